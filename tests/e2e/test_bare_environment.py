"""gerl beside torch, diffusers, peft, transformers, Hydra and pydantic, and nothing that these do not need."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image
from thin_environment import bare_environment

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("torch", "diffusers", "peft", "transformers", "hydra-core", "pydantic")
MISSING = ("ray", "rapidocr", "onnxruntime", "matplotlib", "tensorboard", "rapidfuzz", "cv2", "pandas")
SIZE: dict[str, Any] = {"height": 16, "width": 16, "num_inference_steps": 2, "call": {"max_sequence_length": 8}}
CODE = """
import importlib.util, json, sys

benchmarks, model, out, missing, commands, keys = json.load(open(sys.argv[1]))
sys.path.insert(0, benchmarks)
import gpu  # which finds gerl in the checkout it lies in
import gerl, numpy
from gerl.program.commands import main

there = [name for name in missing if importlib.util.find_spec(name)]
assert not there, there
codes = {name: main(arguments) for name, arguments in commands.items()}

from diffusers import DiffusionPipeline

def bright(images):
    return [float(numpy.asarray(image).mean()) / 255 for image in images]

pipe = DiffusionPipeline.from_pretrained(model)
run = gerl.train(pipe, bright, ["a", "b"], steps=1, out=out, **keys)
try:
    gerl.train(pipe, bright, ["a", "b"], steps=1, out=f"{out}_2", workers=2, **keys)
except gerl.errors.ClusterError as error:
    codes["workers"] = "pip install ray" in str(error)
codes["gpu"] = gpu.main(["sd35_medium_tiny", "--variants", "plain", "--dry-run"])
print(json.dumps({**codes, "rewards": len(run.column("reward/mean"))}))
"""


def test_in_one_process_nothing_else_is_needed(
    model: Path, workplace: Path, arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    def small(folder: str, *keys: str, **others: Any) -> list[str]:
        """Without a launcher: the default, unless it is among the keys."""
        words = arguments(tmp_path / folder, "logger.tensorboard=true", *keys, **others)
        return [word for word in words if not word.startswith("cluster.launcher=local")]

    run, picture = tmp_path / "run", tmp_path / "picture.png"
    Image.new("RGB", (16, 16), (0, 0, 255)).save(picture)
    bright, held_out = f"reward.scorers.bright.path={workplace / 'bright.py'}", workplace / "val.txt"
    commands = {
        "train": ["train", *small("run", "trainer.dump=1", "checkpoint.every=1", validation__data=held_out)],
        "resume": ["train", f"checkpoint.resume={run}", "trainer.steps=3"],
        "report": ["report", f"run={run}"],
        "replay": ["replay", f"dump={run / 'dumps' / 'step_2.json'}", "trust=true"],
        "verify": ["verify", f"run={run}", "trust=true"],
        "evaluate": ["evaluate", f"lora={run}", f"out={tmp_path / 'evaluated'}", "trust=true"],
        "export": ["export", f"run={run}", f"out={tmp_path / 'exported'}", "format=hub"],
        "score": ["score", f"images={picture}", "prompt=a fox", f"out={tmp_path / 'scored'}", bright],
        "preflight": ["preflight", *(word for word in small("none") if not word.startswith("hydra."))],
        "version": ["version"],
        "over Ray": ["train", *small("ray", "cluster.launcher=ray")],
        "reading": ["train", *small("read", "reward.scorers.ocr.weight=1")],
    }
    keys = {"rollout.n": 4, "model.lora_rank": 4, "sampling": SIZE}
    given = [str(ROOT / "benchmarks"), str(model), str(tmp_path / "out"), MISSING, commands, keys]
    (tmp_path / "given.json").write_text(json.dumps(given))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    python = bare_environment(tmp_path / "environment", *NEEDED)
    ended = subprocess.run(
        [python, "-c", CODE, tmp_path / "given.json"], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    codes = json.loads(ended.stdout.strip().splitlines()[-1])
    refused = {"over Ray": 1, "reading": 1}
    assert codes == dict.fromkeys(commands, 0) | refused | {"workers": True, "gpu": 0, "rewards": 1}, ended.stderr
    errors = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert "pip install ray" in errors[0] and "cluster.launcher=local" in errors[0]
    assert "reward.scorers.ocr" in errors[1] and "gerl[ocr]" in errors[1] and len(errors) == 2
    runs = 3  # each says once what it does without
    said = {"pip install ray gives": runs, "pip install tensorboard": runs, "pip install matplotlib": 1}
    assert {words: ended.stderr.count(words) for words in said} == said
