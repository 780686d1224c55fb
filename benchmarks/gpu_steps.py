"""Runs of gerl that benchmarks/gpu.py --minutes measures: `python benchmarks/gpu_steps.py NAME FOLDER [--dry-run]`.

Each writes FOLDER/steps/NAME.json: what was measured, as far as it came. A dry run takes tiny models, and the simulated
accelerator of tests/pretended.py in place of the GPU.
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpu_session import end_with_parent

CHECKOUT = Path(__file__).resolve().parent.parent
SCORER = """
import numpy as np


def compute_score(images, prompts, metadata):
    return [float(np.asarray(image, np.float64).mean()) / 255 for image in images]
"""
OCR = ("rapidocr", "cv2", "onnxruntime")
SIGNS = """experiment=signs algorithm=flow_grpo cluster.launcher=local rollout.prompts_per_step=2 rollout.n=6
rollout.micro_batch_size=6 trainer.steps=3 validation.max_prompts=4 validation.every=3 checkpoint.every=3
logger.progress=false""".split()
REAL = """experiment=sd35_medium_ocr model.parts.text_encoder_3=null cluster.launcher=local rollout.prompts_per_step=8
rollout.n=8 trainer.steps=3 validation.max_prompts=8 validation.every=3 checkpoint.every=3
logger.progress=false""".split()
FEWER = """trainer.steps=1 rollout.n=3 rollout.micro_batch_size=6 sampling.num_inference_steps=4 validation.every=1
validation.max_prompts=2 validation.num_inference_steps=3 checkpoint.every=1""".split()
# of the same at a tiny size
TINY = """rollout.prompts_per_step=2 rollout.n=2 rollout.micro_batch_size=2 sampling.height=64 sampling.width=64
sampling.num_inference_steps=6 model.lora_rank=4 validation.max_prompts=2 validation.num_inference_steps=4
cluster.device=cpu""".split()
TINY_ENCODER = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "projection_dim": 16,
}  # fmt: skip
SIMULATED = "simulated"
UNTIMED = ("time", "timing/", "scorer/", "gpu/", "step")  # metrics that are not compared
Row = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """Folder and device of a step. `keep` writes its measurements so far as JSON."""

    folder: Path
    name: str
    dry: bool

    def keep(self, found: Row) -> None:
        path = self.folder / "steps" / f"{self.name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(found), encoding="utf-8")
        os.replace(part, path)

    def scorer(self) -> Path:
        """A reward that needs no package: the brightness of an image."""
        path = self.folder / "brightness.py"
        path.write_text(SCORER, encoding="utf-8")
        return path


# --- runs of gerl


def started(place: Place, run: str, keys: Sequence[str], device: str, beside: int = 1) -> subprocess.Popen[bytes]:
    """`gerl train` with `keys`, its log beside its folder; one of an earlier session is removed, not continued.

    `beside`: runs at the same time, itself among them. They share the cores, since threads that wait for each other
    are slower than one.
    """
    folder = place.folder / "runs" / run
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    program = ["-m", "gerl", "train"]
    if device == SIMULATED:
        program, device = [str(Path(__file__).resolve()), SIMULATED], "cpu"
    command = [sys.executable, *program, *keys, f"cluster.device={device}", f"hydra.run.dir={folder}"]
    with folder.with_suffix(".log").open("wb") as log:
        threads = {} if beside == 1 else {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // beside))}
        env = os.environ | threads
        return subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, cwd=place.folder, env=env, preexec_fn=end_with_parent
        )  # fmt: skip


def ended(place: Place, run: str, process: subprocess.Popen[bytes]) -> list[Row]:
    """Wait for a run and return its metrics; raises `SystemExit` with the last line of its log if it failed."""
    if process.wait():
        said = (place.folder / "runs" / f"{run}.log").read_text(encoding="utf-8", errors="replace").strip()
        raise SystemExit(f"{run}: {said.splitlines()[-1] if said else 'no reason given'}")
    return rows_of(place.folder / "runs" / run / "metrics.jsonl")


def rows_of(path: Path) -> list[Row]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def simulated(keys: Sequence[str]) -> int:
    """Run `gerl train` on the simulated accelerator."""
    import pretended

    from gerl.cluster import Cluster
    from gerl.trainer.main_flowgrpo import main as train

    Cluster.worker_device = lambda self, rank: str(pretended.DEVICE)  # type: ignore[method-assign]
    with pretended.computing():
        return train(list(keys))


def apart(found: Sequence[Row], expected: Sequence[Row]) -> Row:
    """Return the largest relative difference per metric over all steps, and per step over all metrics.

    Relative to the larger of both, and to 1e-6 of nothing: differences of numbers that are nearly zero are rounding.
    """
    worst: dict[str, float] = {}
    steps: dict[str, float] = {}
    for a, b in zip(found, expected, strict=True):
        for key in sorted(a.keys() & b.keys()):
            if key.startswith(UNTIMED) or not all(isinstance(row[key], int | float) for row in (a, b)):
                continue
            size = max(abs(a[key]), abs(b[key]), 1e-6)
            off = abs(a[key] - b[key]) / size if math.isfinite(a[key]) and math.isfinite(b[key]) else math.inf
            worst[key] = max(worst.get(key, 0.0), off)
            steps[str(a["step"])] = max(steps.get(str(a["step"]), 0.0), off)
    return {"by_metric": worst, "by_step": steps}


def last(keys: Sequence[str]) -> list[str]:
    """Return `keys`, the last of each name."""
    return list({key.partition("=")[0]: key for key in keys}.values())


# --- steps


def gpu_tests(place: Place) -> None:
    """Run the tests marked gpu, except those of the benchmark cases."""
    files = [
        str(path.relative_to(CHECKOUT))
        for path in sorted((CHECKOUT / "tests").rglob("test_*.py"))
        if "mark.gpu" in path.read_text(encoding="utf-8") and path.name != "test_gpu.py"
    ]
    report = place.folder / "steps" / "tests.xml"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "gpu",
        "--continue-on-collection-errors",
        "-p",
        "no:cacheprovider",
    ]
    done = subprocess.run([*command, f"--junitxml={report}", *files], cwd=CHECKOUT)
    outcomes = {"passed": 0, "skipped": 0, "failed": []}
    for case in ElementTree.parse(report).iter("testcase"):
        problems = [*case.findall("failure"), *case.findall("error")]
        name = f"{case.get('classname', '')}::{case.get('name')}".removeprefix("::")
        if problems:
            outcomes["failed"].append(f"{name}: {(problems[0].get('message') or '').splitlines()[:1]}")
        else:
            outcomes["skipped" if case.find("skipped") is not None else "passed"] += 1
    place.keep(outcomes)
    if done.returncode not in (0, 1):
        raise SystemExit(f"pytest ended with {done.returncode}")


def signs_rewards(place: Place) -> tuple[str, list[str]]:
    """The reward of the signs runs, in words and as keys: OCR where its packages are, else brightness."""
    if all(find_spec(name) for name in OCR):
        return "ocr", []
    return "brightness", [f"reward.scorers={{brightness: {{path: {place.scorer()}}}}}"]


def signs(place: Place) -> None:
    """Compare the signs run on the GPU with that on the CPU, in fp32 and bf16, all at once."""
    reward, keys = signs_rewards(place)
    common = last([*SIGNS, *keys, *(FEWER if place.dry else [])])
    gpu = SIMULATED if place.dry else "cuda"
    runs = {
        f"signs-{kind}-{dtype}": started(place, f"signs-{kind}-{dtype}", [*common, f"model.dtype={dtype}"], device, 4)
        for dtype in ("float32", "bfloat16")
        for kind, device in (("cpu", "cpu"), ("gpu", gpu))
    }
    rows: dict[str, list[Row]] = {}
    found: Row = {"reward": reward, "failed": {}}
    while runs:  # in the order in which they end
        run = next((run for run, process in runs.items() if process.poll() is not None), None)
        if run is None:
            time.sleep(0.2)
            continue
        try:
            rows[run] = ended(place, run, runs.pop(run))
        except SystemExit as error:
            found["failed"][run] = str(error)
        for name, pair in PAIRS.items():
            if name not in found and all(run in rows for run in pair):
                found[name] = apart(rows[pair[0]], rows[pair[1]])
        found["ratio_deviation"] = {run: deviation(of) for run, of in rows.items()}
        place.keep(found)
    if found["failed"]:
        raise SystemExit("; ".join(found["failed"].values()))


PAIRS = {  # of the runs that are compared
    "fp32": ("signs-gpu-float32", "signs-cpu-float32"),
    "bf16": ("signs-gpu-bfloat16", "signs-cpu-bfloat16"),
    "bf16 on the GPU, fp32 on the CPU": ("signs-gpu-bfloat16", "signs-cpu-float32"),
}


def deviation(rows: Sequence[Row]) -> float | None:
    """Return the largest |ratio - 1| of a run on policy."""
    return max((row["actor/ratio_deviation"] for row in rows if "actor/ratio_deviation" in row), default=None)


def ratio(place: Place) -> None:
    """Measure the on-policy ratio in bf16, with and without compiled blocks."""
    reward, keys = signs_rewards(place)
    gpu, compiler = ("cpu", "eager") if place.dry else ("cuda", "inductor")  # what is simulated does not compile
    keys = last([*SIGNS, *keys, "model.dtype=bfloat16", "trainer.steps=1", *(FEWER if place.dry else [])])
    ways = {"plain": [], "compile": [f"model.compile={compiler}"]}
    runs = {name: started(place, f"ratio-{name}", keys + more, gpu, 2) for name, more in ways.items()}
    found: Row = {"reward": reward}
    for name, process in runs.items():
        found[name] = deviation(ended(place, f"ratio-{name}", process))
        place.keep(found)


def model(place: Place) -> None:
    """Write the model of the real run into a folder."""
    from real_model import write_model

    start, folder = time.perf_counter(), place.folder / "model"
    changes: dict[str, Any] = {}
    if place.dry:
        from gpu_cases import TINY_CASES

        encoders = {"text_encoder": TINY_ENCODER, "text_encoder_2": TINY_ENCODER}
        changes = {**TINY_CASES["sd35_medium_tiny"].changes, **encoders}
    write_model("sd35_medium_ocr", folder, ["text_encoder_3"], "cpu" if place.dry else "cuda", changes)
    files = sorted(folder.rglob("*.safetensors"))
    size = sum(file.stat().st_size for file in files)
    place.keep({"seconds": time.perf_counter() - start, "bytes": size, "files": len(files)})


def real_keys(place: Place) -> list[str]:
    """Return the keys of the real run; brightness is added because OCR scores all noise 0, which gives no gradient."""
    scorers = [f"+reward.scorers.brightness={{path: {place.scorer()}}}"]
    if not all(find_spec(name) for name in OCR):
        scorers = [f"reward.scorers={{brightness: {{path: {place.scorer()}}}}}"]
    return [*last([*REAL, *(TINY if place.dry else [])]), f"model.path={place.folder / 'model'}", *scorers]


def train(place: Place) -> None:
    """Train sd35_medium_ocr for three steps at its real size, and compare with the prediction of gerl preflight."""
    keys, report = real_keys(place), place.folder / "steps" / "preflight.json"
    unplaced = [key for key in keys if not key.startswith(("cluster.launcher", "logger."))]
    start = time.time()
    run = started(place, "real", keys, "cpu" if place.dry else "cuda")
    with (place.folder / "runs" / "preflight.log").open("wb") as log:
        command = [sys.executable, "-m", "gerl", "preflight", *unplaced, "hardware=h100-80gb", f"out={report}"]
        told = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, cwd=place.folder, preexec_fn=end_with_parent
        )  # fmt: skip
    rows = ended(place, "real", run)
    found = described(rows, time.time() - start, place.folder / "runs" / "real")
    place.keep(found)
    told.wait()
    if report.exists():
        place.keep(found | {"predicted": prediction(json.loads(report.read_text(encoding="utf-8")))})
    if not found["backward"]:
        raise SystemExit("the run trained nothing: its rewards were all equal")


def prediction(report: Mapping[str, Any]) -> Row:
    """Return bytes per phase and seconds per image that gerl preflight predicts for the configured layout."""
    return {"phases": report["memory"]["phases"], "seconds_per_image": report["seconds"], "share": report["share"]}


def described(rows: Sequence[Row], seconds: float, folder: Path) -> Row:
    """Return times per step, memory in bytes, denoiser evaluations and checkpoint sizes of a run."""
    trained = [row for row in rows if "timing/step_s" in row]
    memory = [row["gpu/memory_gb"] for row in rows if "gpu/memory_gb" in row]
    sizes = [file.stat().st_size for file in (folder / "checkpoints").rglob("*") if file.is_file()]
    times = [{k: v for k, v in row.items() if k.startswith("timing/")} for row in trained]
    latency = [row["scorer/ocr/latency_s"] for row in rows if "scorer/ocr/latency_s" in row]
    return {
        "seconds": seconds,
        "steps": len(trained),
        "images": [row["evaluations/images"] for row in trained],
        "times": times,
        "peak": max(memory) * 1e9 if memory else None,
        "backward": sum(row["evaluations/backward"] for row in trained),
        "ratio_deviation": deviation(rows),
        "ocr_latency": latency,
        "checkpoint": sum(sizes),
    }


def export(place: Place) -> None:
    """Export the LoRA of the real run for diffusers."""
    start, out = time.perf_counter(), place.folder / "exported"
    command = [sys.executable, "-m", "gerl", "export", f"run={place.folder / 'runs' / 'real'}", f"out={out}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit((done.stderr.strip().splitlines() or ["no reason given"])[-1])
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    place.keep({"seconds": time.perf_counter() - start, "bytes": size})


STEPS = {
    "tests": gpu_tests, "signs": signs, "ratio": ratio, "model": model, "train": train, "export": export,
}  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    if arguments[:1] == [SIMULATED]:
        return simulated(arguments[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=STEPS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args(arguments)
    folders = [str(CHECKOUT / name) for name in ("", "tests", "benchmarks")]
    os.environ["PYTHONPATH"] = os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")])  # of the runs
    STEPS[args.name](Place(args.folder.resolve(), args.name, args.dry_run))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
