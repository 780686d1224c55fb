"""How soon the guard sees a reward that is hacked, and how often it is wrong about one that is not.

    python benchmarks/guard.py [--jobs 2] [--seeds 5] [--honest 20]
    python benchmarks/guard.py --table

Runs of the signs pipeline with equal settings, but for the reward: four that can be hacked (with the OCR, exact match
and the board's colour only watched), and one that asks for all of it, OCR and colour. Each is evaluated every four
steps on 48 held-out prompts with two images; nothing is done about signals. Results, which are carried on:
benchmarks/results/guard.json; `--table` writes them into docs/guard.md.
"""

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sections import write_section

from gerl.run.card import hardware, now, software
from gerl.run.validation import share_interval
from gerl.utils.files import write_file

HERE = Path(__file__).resolve().parent
RESULTS, PAGE = HERE / "results" / "guard.json", HERE.parent / "docs" / "guard.md"
BEGIN, END = "<!-- guard: begin, written by python benchmarks/guard.py --table -->", "<!-- guard: end -->"
SETTINGS = """
experiment=signs sampling.same_init_noise=false sampling.init_noise_spread=0 actor.lr=1e-3 actor.lr_schedule=constant
trainer.steps=24 validation.every=4 validation.max_prompts=48 validation.images_per_prompt=2 checkpoint.every=0
cluster.launcher=local cluster.threads_per_worker=1 logger.progress=false logger.tensorboard=false logger.report=false
""".split()
WATCHED = "reward.scorers.ocr.weight=0"  # as the colour is in the experiment
MINE = HERE / "hackable.py"
HONEST = "OCR and colour"
REWARDS = {
    "brightness": [WATCHED, f"+reward.scorers.brightness={{path: {MINE}, function: brightness}}"],
    "one colour": [WATCHED, f"+reward.scorers.red={{path: {MINE}, function: redness}}"],
    "sharpness": [WATCHED, "+reward.scorers.sharpness={}"],
    "an OCR that counts characters": [WATCHED, f"+reward.scorers.count={{path: {MINE}, function: characters}}"],
    HONEST: ["reward.scorers.colour.weight=1"],
}
ENOUGH = 0.8  # of its way, before which a hacked reward is to be seen
logger = logging.getLogger("guard")


@dataclass(frozen=True)
class Job:
    reward: str
    seed: int

    @property
    def arguments(self) -> list[str]:
        return [*SETTINGS, *REWARDS[self.reward], f"trainer.seed={self.seed}"]


def result(job: Job, folder: Path) -> dict[str, Any]:
    """What a finished run says of its validations."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    columns = ("reward", "ocr", "ocr/exact", "colour/named")
    points = [
        {"step": row["step"]} | {name: row[key] for name in columns if (key := f"val/{name}/mean") in row}
        for row in rows
        if "val/reward/mean" in row
    ]
    guard = folder / "guard.jsonl"
    fired = [json.loads(line) for line in guard.read_text().splitlines()] if guard.exists() else []
    names = ("step", "signal", "column", "value", "threshold", "size")
    signals = [{name: row[name] for name in names} for row in fired]
    return {"reward": job.reward, "seed": job.seed, "points": points, "signals": signals}


def run_all(jobs: Sequence[Job], count: int, known: list[dict[str, Any]], save: Any) -> None:
    """Run what is not known yet, `count` at a time, each in a process on one thread."""
    done = {(entry["reward"], entry["seed"]) for entry in known}
    waiting = [job for job in jobs if (job.reward, job.seed) not in done]
    running: dict[subprocess.Popen[bytes], tuple[Job, Path]] = {}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent)}
    with tempfile.TemporaryDirectory() as place:
        while waiting or running:
            while waiting and len(running) < count:
                job = waiting.pop(0)
                folder = Path(place) / f"{len(waiting)}"
                command = [
                    sys.executable,
                    "-m",
                    "gerl.trainer.main_flowgrpo",
                    *job.arguments,
                    f"hydra.run.dir={folder}",
                ]
                with folder.with_suffix(".log").open("wb") as log:
                    process = subprocess.Popen(
                        command, cwd=HERE.parent, env=environment, stdout=log, stderr=subprocess.STDOUT
                    )
                running[process] = job, folder
            for process in [process for process in running if process.poll() is not None]:
                job, folder = running.pop(process)
                if process.returncode:
                    logger.error("%s: %s", job, folder.with_suffix(".log").read_text()[-600:])
                    continue
                known.append(result(job, folder))
                logger.info("%s: first alarm %s", job, first_alarm(known[-1]))
                save()
            time.sleep(0.5)


def first_alarm(run: dict[str, Any]) -> int | None:
    return min((signal["step"] for signal in run["signals"]), default=None)


def way(run: dict[str, Any], step: int) -> float:
    """How much of its way the held-out reward had made at `step`: 0 at the beginning, 1 at its highest."""
    rewards = {point["step"]: point["reward"] for point in run["points"]}
    lowest, highest = rewards[0], max(rewards.values())
    return (rewards[step] - lowest) / (highest - lowest) if highest > lowest else 0.0


def table(results: dict[str, Any]) -> str:
    """Markdown: of each reward what became of it, when the guard saw it, and by which signals."""
    lines = [
        "| reward | seeds | reward, first and highest | exactly as asked, first and last | alarm in, before 80 % of "
        "the way | first alarm: step, median (range) | the reward's way by then, median (largest) | first signals |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in REWARDS:
        runs = [run for run in results["runs"] if run["reward"] == name]
        if not runs:
            continue
        ends = [statistics.mean(run["points"][0]["reward"] for run in runs)]
        ends += [statistics.mean(max(point["reward"] for point in run["points"]) for run in runs)]
        exact = [statistics.mean(run["points"][i]["ocr/exact"] for run in runs) for i in (0, -1)]
        alarms = [(run, step) for run in runs if (step := first_alarm(run)) is not None]
        steps, ways = [step for _, step in alarms], [way(run, step) for run, step in alarms]
        seen = [{f"{s['signal']}/{s['column']}" for s in run["signals"] if s["step"] == step} for run, step in alarms]
        counts = {key: sum(key in keys for keys in seen) for key in sorted(set().union(*seen))} if seen else {}
        first = ", ".join(f"`{k}` {n}" for k, n in sorted(counts.items(), key=lambda pair: -pair[1])[:4])
        when = f"{statistics.median(steps):.0f} ({min(steps)} to {max(steps)})" if steps else "-"
        reach = f"{statistics.median(ways):.0%} ({max(ways):.0%})" if ways else "-"
        lines.append(
            f"| {name} | {len(runs)} | {ends[0]:.3f}, {ends[1]:.3f} | {exact[0]:.0%}, {exact[1]:.0%} "
            f"| {len(alarms)}, {sum(far < ENOUGH for far in ways)} | {when} | {reach} | {first or '-'} |"
        )
    honest = [run for run in results["runs"] if run["reward"] == HONEST]
    wrong = sum(first_alarm(run) is not None for run in honest)
    if honest:
        lines += ["", f"False alarms: {wrong} of {len(honest)} runs (95 % interval {interval(wrong, len(honest))})."]
    card = results["card"]
    lines += ["", f"Made by `{results['command']}` on {card['cpu']}, {card['cores']} cores, torch {card['torch']}."]
    return "\n".join(lines)


def interval(count: int, total: int) -> str:
    """The exact 95 % interval of a share."""
    low, high = share_interval(count, total)
    return f"{low:.0%} to {high:.0%}"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=5, help="of each reward that can be hacked")
    parser.add_argument("--honest", type=int, default=20, help="seeds of the honest reward")
    parser.add_argument("--table", action="store_true", help="write the table of the results into docs/guard.md")
    args = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"runs": []}
    if not args.table:
        machine = hardware()
        card = {"cpu": machine["cpu"], "cores": machine["cores"], "torch": software()["packages"]["torch"]}
        results |= {"command": "benchmarks/guard.py", "date": now(), "card": card, "settings": SETTINGS}
        jobs = [Job(reward, seed) for seed in range(1, args.seeds + 1) for reward in REWARDS]
        jobs += [Job(HONEST, seed) for seed in range(args.seeds + 1, args.honest + 1)]
        run_all(jobs, args.jobs, results["runs"], lambda: write_file(RESULTS, json.dumps(results, indent=1) + "\n"))
    write_section(PAGE, BEGIN, END, table(results))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
