"""Compare the guard's actions by honest measures of the checkpoint that `gerl export` takes.

    python benchmarks/guard_actions.py FOLDER [--jobs 2] [--seeds 5]
    python benchmarks/guard_actions.py FOLDER --evaluate

The runs at the small rate in the results of benchmarks/guard.py are those of `off`, `warn` and `stop`: until the first
signal all actions train alike, and then `stop` ends. `kl` and `rollback` are run here with the same seeds, with the
measures of the damage hidden from the guard (`guard.ignored`). `--evaluate` adds the finished runs in FOLDER to
benchmarks/results/guard_actions.json, whose runs are not repeated, and writes the table in benchmarks/README.md.
"""

import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from guard import FIRST_SEED, HIDDEN, PAGE, Job, measured, result, run_or_evaluate
from sections import write_section

from gerl.run.guard import read_guard
from gerl.run.validation import Estimate, estimate
from gerl.utils.files import write_file

RESULTS = Path(__file__).resolve().parent / "results" / "guard_actions.json"
BEGIN = "<!-- guard actions: begin, written by python benchmarks/guard_actions.py FOLDER --evaluate -->"
END = "<!-- guard actions: end -->"
ACTIONS = ("off", "warn", "kl", "rollback", "stop")
RUN = ("kl", "rollback")  # the others are known from the runs under `warn`
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


def jobs(seeds: int) -> Iterator[ActionJob]:
    """All runs that are not measured yet."""
    done = [[run[key] for key in ("kind", "beside", "seed", "action")] for run in stored()]
    for seed, kind, beside, action in product(range(FIRST_SEED, FIRST_SEED + seeds), KINDS, (False, True), RUN):
        if [kind, beside, seed, action] not in done:
            yield ActionJob("signs", kind, "small", beside, seed, action)


def stored() -> list[dict[str, Any]]:
    """The measured runs."""
    return json.loads(RESULTS.read_text())["runs"] if RESULTS.exists() else []


def measure(job: ActionJob, folder: Path) -> dict[str, Any]:
    """Return the measures of a run in `folder` as benchmarks/guard.py has them; `signals`: as the run has met them."""
    found = result(job, folder)
    alarms = [str(alarm["step"]) for alarm in read_guard(folder / job.name) if alarm["signal"] != "rollback"]
    return found | {"signals": {step: [] for step in alarms}}


def row(run: dict[str, Any], action: str) -> dict[str, Any]:
    """Return the measures at the first validation and at the checkpoint that is exported, if each has one."""
    alarms = [] if action == "off" else [int(step) for step in run["signals"]]
    rewards = {step: reward for step, reward in zip(run["steps"], run["reward"], strict=True) if step > 0}
    if action == "stop" and alarms:
        rewards = {step: reward for step, reward in rewards.items() if step <= min(alarms)}
    rewards = {step: reward for step, reward in rewards.items() if step not in alarms} or rewards
    best = max(rewards, key=lambda step: (rewards[step], step))
    at = [0, run["steps"].index(best)]
    measures = {name: [values[i] for i in at] for name, values in run["measures"].items()}
    shown = {key: run[key] for key in ("kind", "beside", "seed")} | {"action": action}
    return shown | measures | {"alarms": len(alarms), "exported": best}


def chosen(run: dict[str, Any]) -> bool:
    """Whether a run of benchmarks/guard.py is one that the actions are compared on."""
    return (run["model"], run["rate"]) == ("signs", "small") and run["kind"] in KINDS


def text(found: Estimate, form: str = ".3f") -> str:
    return f"{found.mean:{form}} ({found.low:{form}} to {found.high:{form}})"


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Markdown: what is left under each action, over kinds and seeds, each kind of reward one observation per seed."""
    before = ", ".join(f"{name} {statistics.fmean(run[name][0] for run in runs):.3f}" for name in HIDDEN["signs"])
    lines = ["## Comparison of actions", "", f"Before training: {before}.", ""]
    for beside, words in ((False, "the hackable reward alone"), (True, "beside OCR")):
        lines += [f"| {words} | OCR, exported | minus that of `warn` | colour, exported | step, median |"]
        lines += ["|---|---|---|---|---|"]
        of_warn = {
            (run["kind"], run["seed"]): run["ocr"][1]
            for run in runs
            if (run["beside"], run["action"]) == (beside, "warn")
        }
        for action in ACTIONS:
            own = [run for run in runs if (run["beside"], run["action"]) == (beside, action)]
            if not own:
                continue
            seeds = [run["seed"] for run in own]  # runs of a seed share prompts and noise
            ocr, colour = (estimate(seeds, [run[name][1] for run in own], (0.0, 1.0)) for name in HIDDEN["signs"])
            changes = [run["ocr"][1] - of_warn[run["kind"], run["seed"]] for run in own]
            change = "" if action == "warn" else text(estimate(seeds, changes, (-1.0, 1.0)), "+.3f")
            step = statistics.median(run["exported"] for run in own)
            lines.append(f"| `{action}` | {text(ocr)} | {change} | {text(colour)} | {step:.0f} |")
        lines.append("")
    return "\n".join(lines).rstrip()


def main(arguments: Sequence[str]) -> int:
    if (finished := run_or_evaluate(__doc__, arguments, jobs)) is None:
        return 0
    folder, done = finished
    runs = [row(run, action) for run in measured().values() if chosen(run) for action in ("off", "warn", "stop")]
    runs += [run for run in stored() if run["action"] in RUN]
    runs += [row(measure(job, folder), job.action) for job in done]
    runs.sort(key=lambda run: (run["seed"], run["kind"], run["beside"], ACTIONS.index(run["action"])))
    write_file(RESULTS, json.dumps({"runs": runs}, separators=(",", ":")).replace('{"kind"', '\n{"kind"') + "\n")
    write_section(PAGE, BEGIN, END, table(runs))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
