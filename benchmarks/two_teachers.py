"""How near a student of two teachers comes to each of them.

    python benchmarks/two_teachers.py [--jobs 2] [--seeds 1 2 3 4 5] [key=value ...]
    python benchmarks/two_teachers.py --table

For each seed three runs of the signs pipeline: a specialist that writes, trained by the OCR on prompts that name a
colour; one that paints signs red where none is named; and their student (`algorithm=opd`), which starts from the base
model and gets both kinds of prompts. All are validated on the same held-out prompts of both kinds; key=value are the
student's. Results: benchmarks/results/two_teachers.json; `--table` writes them into benchmarks/README.md.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from sections import write_section
from seeds import mean_and_interval

from gerl.run.card import hardware, now, software
from gerl.utils.dataset import load_prompts
from gerl.utils.files import write_file

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "two_teachers.json", ROOT / "benchmarks" / "README.md"
BEGIN = "<!-- two_teachers: begin, written by python benchmarks/two_teachers.py --table -->"
END = "<!-- two_teachers: end -->"
KINDS = {"ocr": "writes what is asked", "red": "is red where no colour is named"}
COMMON = """
experiment=signs cluster.launcher=local cluster.threads_per_worker=1 logger.progress=false logger.tensorboard=false
logger.report=false sampling.num_inference_steps=10 validation.num_inference_steps=null actor.lr_schedule=constant
checkpoint.every=0
""".split()
SCORERS = (
    "reward.scorers={ocr: {data_sources: [ocr]}, red: {path: benchmarks/hackable.py, function: redness, "
    "data_sources: [red]}}"
)
STEPS = {"ocr": 40, "red": 12, "student": 40}
OWN = {
    "ocr": "actor.lr=1e-3".split(),
    "red": "actor.lr=1e-3".split(),
    "student": "algorithm=opd actor.lr=1e-3 rollout.prompts_per_step=24 rollout.n=1".split(),
}


def write_prompts(folder: Path) -> None:
    """Files of prompts, of one kind and of both: half of the texts of the signs name a colour."""
    for name in ("train", "val"):
        rows: dict[str, list[str]] = {kind: [] for kind in KINDS}
        for i, prompt in enumerate(load_prompts(f"signs_{name}")):
            kind = list(KINDS)[i % 2]
            text = prompt.text if kind == "ocr" else re.sub(r"^an? \w+ sign", "a sign", prompt.text)
            rows[kind].append(json.dumps({"prompt": text, "data_source": kind}))
        for kind, lines in {**rows, "both": [*rows["ocr"], *rows["red"]]}.items():
            (folder / f"{name}_{kind}.jsonl").write_text("\n".join(lines) + "\n")


def train(name: str, folder: Path, seed: int, arguments: Sequence[str]) -> list[dict[str, float]]:
    """Train one of the three; returns its validations: the step, and the mean of each kind."""
    place = folder / f"{name}_{seed}"
    kind = name if name in KINDS else "both"
    steps = STEPS[name]
    keys = [f"data.train={folder / f'train_{kind}.jsonl'}", f"validation.data={folder / 'val_both.jsonl'}"]
    keys += [f"trainer.steps={steps}", f"validation.every={steps // 4}", f"trainer.seed={seed}", SCORERS]
    command = [sys.executable, "-m", "gerl.trainer.main_flowgrpo", *COMMON, *keys, *OWN[name], *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, f"hydra.run.dir={place}"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{name}, seed {seed}: {done.stderr[-800:]}")
    rows = map(json.loads, (place / "metrics.jsonl").read_text().splitlines())
    return [
        {"step": row["step"]} | {k: row[f"val/reward/{k}/mean"] for k in KINDS}
        for row in rows
        if "val/reward/mean" in row
    ]


def seed_of(seed: int, folder: Path, keys: Sequence[str]) -> dict[str, Any]:
    """The validations of the specialists and of the student of a seed."""
    run: dict[str, Any] = {"seed": seed, "keys": list(keys)}
    for kind in KINDS:
        run[kind] = train(kind, folder, seed, ())
    teachers = ", ".join(
        f"{{lora: {folder / f'{kind}_{seed}' / 'checkpoints' / f'step_{STEPS[kind]}'}, data_source: {kind}}}"
        for kind in KINDS
    )
    run["student"] = train("student", folder, seed, [f"algorithm.teachers=[{teachers}]", *keys])
    print(run, flush=True)
    return run


def table(results: dict[str, Any]) -> str:
    """Markdown: base model, specialists and student on both kinds of prompts, and the student's distance to each."""

    def ends(name: str, kind: str, at: int = -1) -> list[float]:
        return [run[name][at][kind] for run in results["runs"]]

    lines = [f"| model | {' | '.join(KINDS.values())} |", "|---|---|---|"]
    for label, name, at in (
        ("base model", "student", 0),
        ("specialist that writes", "ocr", -1),
        ("specialist that paints red", "red", -1),
        ("student of both", "student", -1),
    ):
        lines.append(f"| {label} | {' | '.join(mean_and_interval(ends(name, kind, at)) for kind in KINDS)} |")
    less = [
        mean_and_interval([one - other for one, other in zip(ends("student", kind), ends(kind, kind), strict=True)])
        for kind in KINDS
    ]
    lines.append(f"| student minus its teacher, by seed | {' | '.join(less)} |")
    card = results["card"]
    lines += ["", f"{len(results['runs'])} seeds, 95 % intervals (t distribution). Made by"]
    lines[-1] += f" `{results['command']}` on {card['cpu']}, {card['cores']} cores, torch {card['torch']}."
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("keys", nargs="*", metavar="key=value", help="of the student")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="write the results into benchmarks/README.md")
    args = parser.parse_intermixed_args(arguments)
    if args.table:
        write_section(PAGE, BEGIN, END, table(json.loads(args.out.read_text())))
        return 0
    with tempfile.TemporaryDirectory() as place, ThreadPoolExecutor(args.jobs) as pool:
        write_prompts(Path(place))
        runs = list(pool.map(lambda seed: seed_of(seed, Path(place), args.keys), args.seeds))
    machine = hardware()
    card = {"cpu": machine["cpu"], "cores": machine["cores"], "torch": software()["packages"]["torch"]}
    command = " ".join(["python", "benchmarks/two_teachers.py", *args.keys])
    results = {"command": command, "date": now(), "card": card, "runs": runs}
    write_file(args.out, json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
