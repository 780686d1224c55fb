"""What each action of the guard leaves of a run: the honest measures of what `gerl export` takes from it.

    python benchmarks/guard_actions.py FOLDER [--jobs 2] [--seeds 5]
    python benchmarks/guard_actions.py FOLDER --evaluate

FOLDER has the runs of benchmarks/guard.py, whose runs at the small rate are those of `warn` and `stop`: until the first
signal all actions train alike, and then `stop` ends. `kl` and `rollback` are run here with the same seeds, with the
measures of the damage hidden from the guard (`guard.ignored`). `--evaluate` writes
benchmarks/results/guard_actions.json and the table in docs/guard.md.
"""

import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from guard import FIRST_SEED, HIDDEN, PAGE, Job, result, run_or_evaluate
from sections import write_section

from gerl.run.guard import read_guard
from gerl.run.validation import Estimate, estimate, known, load_validation, mean, validation_steps
from gerl.utils.files import write_file

RESULTS = Path(__file__).resolve().parent / "results" / "guard_actions.json"
BEGIN = "<!-- guard actions: begin, written by python benchmarks/guard_actions.py FOLDER --evaluate -->"
END = "<!-- guard actions: end -->"
ACTIONS = ("warn", "kl", "rollback", "stop")
KINDS = ("bright_part", "small_file", "frame", "length")
UNSEEN = [f"{signal}/{column}" for signal in ("watched", "disagreement") for column in ("ocr", "ocr/exact", "colour")]
UNSEEN += [f"{signal}/colour/named" for signal in ("watched", "disagreement")]


@dataclass(frozen=True)
class ActionJob(Job):
    """A run under an action of the guard."""

    action: str = "kl"

    @property
    def name(self) -> str:
        return f"{super().name}-{self.action}"

    def arguments(self, folder: Path) -> list[str]:
        kept = [a for a in super().arguments(folder) if not a.startswith("checkpoint.every=")]
        return [*kept, f"guard.action={self.action}", f"guard.ignored=[{','.join(UNSEEN)}]", "checkpoint.every=3"]


def jobs(seeds: int) -> Iterator[Job]:
    """All runs, those of benchmarks/guard.py under `warn`."""
    for seed in range(FIRST_SEED, FIRST_SEED + seeds):
        for kind in KINDS:
            for beside in (False, True):
                yield Job("signs", kind, "small", beside, seed)
                for action in ("kl", "rollback"):
                    yield ActionJob("signs", kind, "small", beside, seed, action)


def row(folder: Path, job: Job, action: str) -> dict[str, Any]:
    """Return the measures at the first validation and at the one that is exported, the best reward that counts."""
    run = folder / job.name
    validations = {step: load_validation(run, step, pictures=False) for step in validation_steps(run)}
    if isinstance(job, ActionJob):
        alarms = [found["step"] for found in read_guard(run) if found["signal"] != "rollback"]
    else:
        alarms = [int(step) for step in result(job, folder)["signals"]]
    counted = dict(validations)
    if action == "stop" and alarms:
        counted = {step: found for step, found in validations.items() if step < min(alarms)}
    elif action == "rollback":
        counted = {step: found for step, found in validations.items() if step not in alarms}
    rewards = {step: statistics.fmean(known(found.rewards)) for step, found in counted.items()}
    best = max(rewards, key=lambda step: (rewards[step], step))
    measures = {name: [mean(validations[step].by_scorer[name]) for step in (0, best)] for name in HIDDEN["signs"]}
    shown = {"kind": job.kind, "beside": job.beside, "seed": job.seed, "action": action}
    return shown | measures | {"alarms": len(set(alarms)), "exported": best}


def text(found: Estimate) -> str:
    return f"{found.mean:.3f} ({found.low:.3f} to {found.high:.3f})"


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Markdown: what is left under each action, over kinds and seeds, each kind of reward one observation per seed."""
    lines = ["## What each action leaves", ""]
    for beside, words in ((False, "the hackable reward alone"), (True, "beside OCR")):
        lines += [f"| {words} | runs | OCR, first | OCR, exported | colour, first | colour, exported | step, median |"]
        lines += ["|---|---|---|---|---|---|---|"]
        for action in ACTIONS:
            own = [run for run in runs if (run["beside"], run["action"]) == (beside, action)]
            if not own:
                continue
            seeds = [run["seed"] for run in own]  # runs of a seed share prompts and noise
            ocr, colour = (
                [estimate(seeds, [run[name][i] for run in own], (0.0, 1.0)) for i in (0, 1)] for name in HIDDEN["signs"]
            )
            step = statistics.median(run["exported"] for run in own)
            cells = [f"{ocr[0].mean:.3f}", text(ocr[1]), f"{colour[0].mean:.3f}", text(colour[1]), f"{step:.0f}"]
            lines.append(f"| `{action}` | {len(own)} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines).rstrip()


def main(arguments: Sequence[str]) -> int:
    if (finished := run_or_evaluate(__doc__, arguments, jobs)) is None:
        return 0
    folder, done = finished
    actions = {job: (job.action,) if isinstance(job, ActionJob) else ("warn", "stop") for job in done}
    runs = [row(folder, job, action) for job in done for action in actions[job]]
    write_file(RESULTS, json.dumps({"runs": runs}, separators=(",", ":")).replace('{"kind"', '\n{"kind"') + "\n")
    write_section(PAGE, BEGIN, END, table(runs))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
