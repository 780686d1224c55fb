"""Compare the guard's actions by honest measures of the checkpoint that `gerl export` takes.

    python benchmarks/guard_actions.py FOLDER [--jobs 2] [--seeds 5]
    python benchmarks/guard_actions.py FOLDER --evaluate

Runs of the signs model with rewards that can be hacked, with the default's looks and a validation every quarter; the
measures of the damage are hidden from the guard (`guard.ignored`). The runs under `warn` are those
of `off` and `stop` too: until the first signal all actions train alike, and then `stop` ends. Finished runs in FOLDER
are not repeated. `--evaluate` adds them to benchmarks/results/guard_actions.json, whose runs are not repeated either,
and writes the table in benchmarks/README.md.
"""

import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from guard import FIRST_SEED, HIDDEN, PAGE, Job, result, run_or_evaluate
from sections import write_section

from gerl.run.guard import read_guard
from gerl.run.hacking import NO_SIGNALS
from gerl.run.validation import Estimate, estimate
from gerl.utils.files import write_file

RESULTS = Path(__file__).resolve().parent / "results" / "guard_actions.json"
BEGIN = "<!-- guard actions: begin, written by python benchmarks/guard_actions.py FOLDER --evaluate -->"
END = "<!-- guard actions: end -->"
ACTIONS = ("off", "warn", "kl", "rollback", "stop")
RUNS_OF = {"warn": ("off", "warn", "stop"), "kl": ("kl",), "rollback": ("rollback",)}  # the action of a run -> of rows
KINDS = ("bright_part", "small_file", "frame", "length")
STEPS, EVERY = 24, 6  # those of the small rate
UNSEEN = [f"{signal}/{column}" for signal in ("watched", "disagreement") for column in ("ocr", "ocr/exact", "colour")]
UNSEEN += [f"{signal}/colour/named" for signal in ("watched", "disagreement")]


@dataclass(frozen=True)
class ActionJob(Job):
    """A run under an action of the guard."""

    action: str = "warn"

    @property
    def name(self) -> str:
        return f"{super().name}-{self.action}"

    def arguments(self, folder: Path) -> list[str]:
        arguments = [a for a in super().arguments(folder) if not a.startswith("checkpoint.every=")]
        own = [f"checkpoint.every={EVERY}", f"guard.action={self.action}", f"guard.ignored=[{','.join(UNSEEN)}]"]
        return [*arguments, *own]


def jobs(seeds: int) -> Iterator[ActionJob]:
    """All runs that are not measured yet; the first seeds first, so that a part of them is a comparison too."""
    done = [[run[key] for key in ("kind", "seed", "action")] for run in stored()]
    for seed, kind, action in product(range(FIRST_SEED, FIRST_SEED + seeds), KINDS, RUNS_OF):
        if [kind, seed, action] not in done:
            yield ActionJob("signs", kind, "small", False, seed, action)


def stored() -> list[dict[str, Any]]:
    """The measured rows."""
    return json.loads(RESULTS.read_text())["runs"] if RESULTS.exists() else []


def rows(job: ActionJob, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the measures before training and of what is exported under each action that the run of `job` stands for."""
    run = result(job, folder)
    alarms = sorted({int(row["step"]) for row in read_guard(folder / job.name) if row["signal"] not in NO_SIGNALS})
    for action in RUNS_OF[job.action]:
        step = exported(run, [] if action == "off" else alarms, ends=action == "stop")
        at = [0, run["steps"].index(step)]
        measures = {name: [values[i] for i in at] for name, values in run["measures"].items()}
        shown = {key: run[key] for key in ("kind", "seed")} | {"action": action}
        yield shown | measures | {"alarms": len(alarms), "exported": step}


def exported(run: dict[str, Any], alarms: Sequence[int], ends: bool) -> int:
    """Return the step that `gerl export` takes: the best reward without signals, else 0, which is the base model.

    alarms: steps of looks and validations with signals. ends: whether the run ends at the first of them.
    """
    rewards = {step: reward for step, reward in zip(run["steps"], run["reward"], strict=True) if step > 0}
    last = min(alarms) if alarms and ends else max(run["steps"])
    free = {step: reward for step, reward in rewards.items() if step <= last and step not in alarms}
    return max(free, key=lambda step: (free[step], step), default=0)


def text(found: Estimate, form: str = ".3f") -> str:
    return f"{found.mean:{form}} ({found.low:{form}} to {found.high:{form}})"


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Markdown: what is left under each action, over kinds and seeds, each kind of reward one observation per seed."""
    lines = ["## Comparison of actions", ""]
    if not runs:
        return "\n".join([*lines, "Not measured with this guard yet."])
    before = ", ".join(f"{name} {statistics.fmean(run[name][0] for run in runs):.3f}" for name in HIDDEN["signs"])
    lines += [f"Before training: {before}.", ""]
    lines += ["| action | OCR, exported | minus that of `warn` | colour, exported | base model | step, median |"]
    lines += ["|---|---|---|---|---|---|"]
    of_warn = {(run["kind"], run["seed"]): run["ocr"][1] for run in runs if run["action"] == "warn"}
    for action in ACTIONS:
        rows = [run for run in runs if run["action"] == action]
        if not rows:
            continue
        seeds = [run["seed"] for run in rows]  # runs of a seed share prompts and noise
        ocr, colour = (estimate(seeds, [run[name][1] for run in rows], (0.0, 1.0)) for name in HIDDEN["signs"])
        changes = [run["ocr"][1] - of_warn[run["kind"], run["seed"]] for run in rows]
        change = "" if action == "warn" else text(estimate(seeds, changes, (-1.0, 1.0)), "+.3f")
        step, none = statistics.median(run["exported"] for run in rows), sum(run["exported"] == 0 for run in rows)
        lines.append(f"| `{action}` | {text(ocr)} | {change} | {text(colour)} | {none} of {len(rows)} | {step:.0f} |")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    if (finished := run_or_evaluate(__doc__, arguments, jobs)) is None:
        return 0
    folder, done = finished
    runs = [*stored(), *(row for job in done for row in rows(job, folder))]
    runs.sort(key=lambda run: (run["seed"], run["kind"], ACTIONS.index(run["action"])))
    write_file(RESULTS, json.dumps({"runs": runs}, separators=(",", ":")).replace('{"kind"', '\n{"kind"') + "\n")
    write_section(PAGE, BEGIN, END, table(runs))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
