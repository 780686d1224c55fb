"""Golden runs: metrics and weights of three steps of eight presets, in one process, over Ray, with kills and resumed.

`python tests/net.py` checks all of them against `golden_runs.json`, bit for bit on the machine that recorded it;
`python tests/net.py record` writes that file anew. A run with killed workers must equal that of `ray`, and a resumed
one that of `local`.
"""

import hashlib
import json
import os
import re
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tiny
import torch
from safetensors.torch import load_file

from gerl.trainer.main_flowgrpo import main

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = Path(__file__).with_name("golden_runs.json")
STEPS = 3
KEYS = """
experiment=plain model.lora_rank=4 model.lora_alpha=8 sampling.height=16 sampling.width=16
sampling.num_inference_steps=4 sampling.guidance_scale=1.0 rollout.prompts_per_step=2 rollout.n=4
rollout.micro_batch_size=4 cluster.device=cpu cluster.threads_per_worker=1 logger.progress=false
logger.tensorboard=false logger.report=false logger.live=false actor.lr=0.01 validation.every=1 checkpoint.every=1
validation.num_inference_steps=null checkpoint.keep=9 reward.trial=false guard.judge=off
""".split()
FITTED = {
    "flow_grpo": "algorithm.kl_coef=0.04 actor.updates_per_step=2",
    "mix_grpo": "sampling.window_size=2 sampling.window_every=2",
    "tempflow_grpo": "rollout.n=2 algorithm.branch_factor=3",
    "branch_grpo": "rollout.n=2 algorithm.split_steps=[0,1]",
    "diffusion_nft": "",
    "awm_fast": "",
    "dgpo": "sampling.window_range=[0,3]",
    "refl": "rollout.n=1 rollout.prompts_per_step=4 rollout.micro_batch_size=2 algorithm.decode_batch=2",
}
TWO = "cluster.launcher=ray cluster.num_workers=2"
WAYS = {
    "local": "cluster.launcher=local",
    "resumed": "cluster.launcher=local",
    "ray": TWO,
    "killed": TWO,
    "ranks": "cluster.launcher=ray cluster.num_workers=1 cluster.ranks_per_worker=2 model.shard=all",
    "split": f"{TWO} cluster.layout=split trainer.staleness=1",
}
RECORDED = {"local": "local", "resumed": "local", "ray": "ray", "killed": "ray", "ranks": "ranks", "split": "split"}
ON_TIME = ("dgpo", "refl")  # they refuse trainer.staleness
CASES = [(preset, way) for preset in FITTED for way in WAYS]
PROMPTS = ["a red fox", "blue", 'a sign that reads "482"', "x y", "seven", "a cat"]
BRIGHT = """
import numpy as np

def compute_score(images, prompts, metadata):
    return [float(np.asarray(image).mean()) / 255 for image in images]
"""
BRIGHT_TENSORS = """
def compute_score(images, prompts, metadata):
    return images.flatten(1).mean(1)

compute_score.takes_tensors = True
"""
# evaluations include repeated work, and the gradient_ metrics are 1 up to rounding
UNTIMED = re.compile(r"(?!time|timing/|evaluations/|scorer/|cluster/|val/.*/gain_|actor/gradient_)")
Rows = list[dict[str, Any]]


def workplace(folder: Path) -> Path:
    """A folder with the model, prompts and scorers of the golden runs."""
    tiny.sd3(layers=1).save_pretrained(folder / "sd3")
    (folder / "train.txt").write_text("\n".join(PROMPTS) + "\n")
    (folder / "val.txt").write_text("\n".join(PROMPTS[:4]) + "\n")
    (folder / "bright.py").write_text(BRIGHT)
    (folder / "bright_tensors.py").write_text(BRIGHT_TENSORS)
    return folder


def train(place: Path, run_dir: Path, preset: str, way: str) -> tuple[Rows, str]:
    """The metrics of a golden run without times and intervals, and the digest of its state after the last step."""
    scorer = "bright_tensors.py" if preset == "refl" else "bright.py"
    fixed = {
        "algorithm": preset,
        "hydra.run.dir": run_dir,
        "model.path": place / "sd3",
        "data.train": place / "train.txt",
        "validation.data": place / "val.txt",
        "sampling.call": "{max_sequence_length: 8}",
        "reward.scorers.bright.path": place / scorer,
    }
    arguments = [*KEYS, *(f"{key}={value}" for key, value in fixed.items())]
    keys = dict(pair.split("=", 1) for pair in [*arguments, *FITTED[preset].split(), *WAYS[way].split()])
    if preset in ON_TIME:
        keys["trainer.staleness"] = "0"
    wishes = run_dir.with_name("kills")
    if way == "killed":  # while it samples, and while it trains
        wishes.mkdir()
        for wish in ("sample.0.2", "accumulate.1.3"):
            (wishes / wish).write_text(str(int(signal.SIGKILL)))
    if way == "resumed":
        assert main([f"{key}={value}" for key, value in (keys | {"trainer.steps": 1}).items()]) == 0
        keys["checkpoint.resume"] = str(run_dir)
    assert main([f"{key}={value}" for key, value in (keys | {"trainer.steps": STEPS}).items()]) == 0
    assert not wishes.exists() or not list(wishes.iterdir())
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    rows = [{name: value for name, value in json.loads(line).items() if UNTIMED.match(name)} for line in lines]
    return rows, digest(run_dir / "checkpoints" / f"step_{STEPS}" / "state.safetensors")


def digest(file: Path) -> str:
    """SHA-256 of all tensors of a file."""
    found = hashlib.sha256()
    for name, tensor in sorted(load_file(file).items()):
        found.update(name.encode() + tensor.numpy().tobytes())
    return found.hexdigest()


def machine() -> str:
    """What the last bits of a result depend on: torch and the processor."""
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()) if sys.platform == "linux" else None
    return f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {cpu[1] if cpu else sys.platform}"


def differences(found: Rows, expected: Rows, exact: bool) -> Iterator[str]:
    """Where the metrics of a run are not those that are expected, in words."""
    if len(found) != len(expected):
        yield f"{len(found)} rows of metrics instead of {len(expected)}"
    for row, known in zip(found, expected, strict=False):
        for name in sorted({*row, *known}):
            value, wanted = row.get(name, "absent"), known.get(name, "absent")
            if value != wanted and (exact or not close(value, wanted)):
                yield f"step {row['step']}: {name} is {value} instead of {wanted}"


def close(value: object, wanted: object) -> bool:
    """Whether two numbers differ by no more than the rounding of another processor."""
    if not isinstance(value, float) or not isinstance(wanted, float):
        return False
    return abs(value - wanted) <= 1e-4 + 0.02 * abs(wanted)


def kills(folder: Path) -> dict[str, str]:
    """The environment in which workers look into `folder` for kills that are asked of them."""
    return {
        "GERL_KILLS": str(folder / "kills"),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "tests" / "in_workers"), str(ROOT)]),
    }


def check(place: Path, run_dir: Path, preset: str, way: str, golden: Mapping[str, Any]) -> list[str]:
    """Train and compare; what differs from the record, in words."""
    rows, weights = train(place, run_dir, preset, way)
    known = golden["runs"][preset][RECORDED[way]]
    exact = golden["machine"] == machine()
    found = list(differences(rows, known["metrics"], exact))
    if exact and weights != known["state"]:
        found.append("the weights differ")
    return found


def command(record: bool, cases: list[tuple[str, str]]) -> int:
    golden: dict[str, Any] = {"machine": machine(), "runs": {}} if record else json.loads(GOLDEN.read_text())
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        place = workplace(Path(folder))
        for preset, way in cases:
            run_dir = place / f"{preset}-{way}" / "run"
            run_dir.parent.mkdir()
            os.environ.update(kills(run_dir.parent))
            if record and way == RECORDED[way]:
                rows, weights = train(place, run_dir, preset, way)
                golden["runs"].setdefault(preset, {})[way] = {"state": weights, "metrics": rows}
                continue
            found = check(place, run_dir, preset, way, golden)
            failed += bool(found)
            sys.stdout.write(f"{preset} {way}: {'; '.join(found[:3]) or 'equal'}\n")
            sys.stdout.flush()
    if record:
        GOLDEN.write_text(json.dumps(golden).replace("{", "\n{") + "\n")
    return min(failed, 1)


if __name__ == "__main__":
    given = sys.argv[1:]
    chosen = [case for case in CASES if not set(given) - {"record"} or set(case) & set(given)]
    sys.exit(command("record" in given, chosen))
