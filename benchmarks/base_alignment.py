"""The base model as a reward on signs: by itself, beside OCR, and beside a brightness that destroys the text.

    python benchmarks/base_alignment.py FOLDER [--jobs 2] [--seeds 5]
    python benchmarks/base_alignment.py FOLDER --evaluate

Runs of the signs model for 24 steps at a constant learning rate of 1e-3, with the same seeds and each part of the
reward divided by its groups' deviation. `--evaluate` writes the table in benchmarks/README.md.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from guard import HERE, HIDDEN, PLAIN, Job, run_or_evaluate
from sections import write_section

from gerl.run.validation import estimate, load_validation, mean, validation_steps

PAGE = HERE / "README.md"
BEGIN = "<!-- base_alignment: begin, written by python benchmarks/base_alignment.py FOLDER --evaluate -->"
END = "<!-- base_alignment: end -->"
FIRST_SEED = 2
REWARDS = {  # the scorers with a weight
    "base_alignment": ["base_alignment"],
    "ocr": ["ocr"],
    "ocr and base_alignment": ["ocr", "base_alignment"],
    "brightness": ["brightness"],
    "brightness and base_alignment": ["brightness", "base_alignment"],
}
COLUMNS = ("ocr", "ocr/exact", "colour", "base_alignment", "brightness")


@dataclass(frozen=True)
class Rewarded(Job):
    """A run with a reward of `REWARDS`, its `kind`."""

    def arguments(self, folder: Path) -> list[str]:
        brightness = {"path": str(HERE / "hackable.py"), "function": "brightness"}
        scorers = {name: dict(scorer) for name, scorer in HIDDEN["signs"].items()}
        scorers |= {"base_alignment": {}, "brightness": brightness}
        for name, scorer in scorers.items():
            rewarded = name in REWARDS[self.kind]
            scorer |= {"normalise": "group"} if rewarded else {"weight": 0, "during": "validation"}
        text = yaml.safe_dump(scorers, default_flow_style=True, width=10**6).strip()
        fixed = ["actor.lr=1e-3", "trainer.steps=24", "validation.every=8", f"trainer.seed={self.seed}"]
        return ["experiment=signs", *PLAIN, *fixed, f"reward.scorers={text}", f"hydra.run.dir={folder / self.name}"]


def jobs(seeds: int) -> Iterator[Rewarded]:
    for seed in range(FIRST_SEED, FIRST_SEED + seeds):
        yield from (Rewarded("reward", kind, "", False, seed) for kind in REWARDS)


def table(folder: Path, done: Sequence[Job]) -> str:
    """Markdown: the measures of the base model, and after training, with intervals over the seeds."""
    measured: dict[str, list[tuple[int, list[float], list[float]]]] = {}
    for job in done:
        run = folder / job.name
        first, last = (load_validation(run, validation_steps(run)[i], pictures=False) for i in (0, -1))
        ends = [[mean(found.by_scorer[name]) or 0.0 for name in COLUMNS] for found in (first, last)]
        measured.setdefault(job.kind, []).append((job.seed, *ends))
    lines = [f"| reward | seeds | {' | '.join(f'`{name}`' for name in COLUMNS)} |", "|---" * (len(COLUMNS) + 2) + "|"]
    before = {seed: first for found in measured.values() for seed, first, _ in found}
    cells = [f"{estimate(list(before), [row[i] for row in before.values()]).mean:.3f}" for i in range(len(COLUMNS))]
    lines.append(f"| (before training) | {len(before)} | {' | '.join(cells)} |")
    for kind in REWARDS:
        if found := measured.get(kind):
            seeds = [seed for seed, _, _ in found]
            ranges = [None if name == "base_alignment" else (0.0, 1.0) for name in COLUMNS]
            ends = [estimate(seeds, [last[i] for _, _, last in found], ranges[i]) for i in range(len(COLUMNS))]
            cells = [f"{end.mean:.3f} ({end.low:.3f} to {end.high:.3f})" for end in ends]
            lines.append(f"| {kind} | {len(seeds)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    if (finished := run_or_evaluate(__doc__, arguments, jobs)) is not None:
        write_section(PAGE, BEGIN, END, table(*finished))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
