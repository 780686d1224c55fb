"""The value that moves through the training loop, and its table of scores."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gerl.protocol import DATA_SOURCE, Group, RolloutTask, Sample, ScorerFailure, Scores, UpdateStats
from gerl.rewards.total import applies

if TYPE_CHECKING:
    import torch

    from gerl.algorithms import Rewards
    from gerl.cluster import Pending
    from gerl.config import RewardConfig
    from gerl.progress import Stopwatch
    from gerl.protocol import Images
    from gerl.run.guard import Signal
    from gerl.run.validation import Validation

Metrics = dict[str, float]
NO_NAME = re.compile(r"[^\w .:-]")  # characters that trackers refuse in metric names, and the slash


@dataclass
class Step:
    """One iteration of the trainer.

    Example: step 12 of a run with 2 prompts x 3 images has 6 rows in `scores`, and `credit` of shape [6, 10] for 10
    denoising steps, NaN where a sample or a denoising step is not trained. Step 0 is the validation before training.
    """

    number: int
    watch: Stopwatch
    tasks: list[RolloutTask] = field(default_factory=list)
    images: list[Pending[Images]] = field(default_factory=list)  # of the first round
    scores: ScoreTable = field(default_factory=lambda: ScoreTable())
    round: Sequence[RolloutTask] = ()  # tasks of the last round of sampling
    rounds: int = 0  # with dynamic sampling there may be several
    rewards: Rewards | None = None  # of the trainable samples
    credit: torch.Tensor | None = None  # [B, T]
    kl_weight: torch.Tensor | None = None  # [B] factors of the KL to the reference; None: 1
    stats: UpdateStats = field(default_factory=UpdateStats)  # of the optimizer steps
    lag: int = 0  # finished steps between rollout and update; 0 is on-policy
    taken: bool = False  # the run's state includes its update
    validation: Validation | None = None  # after it
    signals: list[Signal] = field(default_factory=list)  # signs of reward hacking in the validation
    metrics: Metrics = field(default_factory=dict)

    def restart(self) -> None:
        """Reset the step to be repeated, unless its update is finished."""
        if not self.taken:
            self.__dict__ = Step(self.number, self.watch.restarted()).__dict__


@dataclass
class ScoreTable:
    """The samples of a step or a validation in order, with their scores: one row per image.

    Example: two prompts with three images each, scored by `ocr` and `aesthetic`, have six `samples`, six `totals` (the
    weighted sums, None where a scorer failed) and six values in each of the columns `ocr` and `aesthetic` of
    `by_scorer`.
    """

    samples: list[Sample] = field(default_factory=list)
    totals: list[float | None] = field(default_factory=list)
    by_scorer: dict[str, list[float | None]] = field(default_factory=dict)
    failures: list[list[ScorerFailure]] = field(default_factory=list)
    given: bool = False  # ranks and labels of dataset images are not rewards

    def add(self, samples: Sequence[Sample], scores: Scores) -> None:
        """Append a micro-batch; a column missing on one side (its scorer failed) is filled with None."""
        for name in {**self.by_scorer, **scores.by_scorer}:
            known = self.by_scorer.setdefault(name, [None] * len(self.samples))
            known.extend(scores.by_scorer.get(name, [None] * len(samples)))
        self.given = self.given or samples[0].dataset_image is not None
        self.samples += samples
        self.totals += scores.totals
        self.failures += scores.failures

    def metrics(self, config: RewardConfig, validation: bool = False) -> Metrics:
        """Return the mean of the total and of each score, the success rate, and the mean best image of a group.

        Each over the samples that have a value. Means of validations are compared between steps, so a mean that lacks
        a failed prompt is NaN. Without a total if only people score, who vote in training only.
        """
        metrics: Metrics = {"val/failures": float(self.unscored)} if validation else {}
        total = {"reward": self.totals} if self.measured and not self.given else {}
        for name, values in {**total, **self.by_scorer}.items():
            key = f"val/{name}" if validation else "reward" if name == "reward" else f"reward/{name}"
            if validation and not self._whole(config, name, values):
                values = []
            metrics[f"{key}/mean"] = mean(values)
            if not validation:
                metrics[f"{key}/best_of_n"] = mean(self._best(values))
            if (scorer := config.scorers.get(name)) is not None and scorer.success is not None:
                metrics[f"{key}/success_rate"] = mean([None if v is None else v >= scorer.success for v in values])
        return metrics | (self._by_source() if validation else {})

    def _by_source(self) -> Metrics:
        """Return the mean total of each `data_source` of the held-out prompts, if there are several."""
        found: dict[str, list[float | None]] = {}
        for sample, total, failures in zip(self.samples, self.totals, self.failures, strict=True):
            if total is None and not failures:  # no scorer applies
                continue
            if (source := sample.prompt.metadata.get(DATA_SOURCE)) is not None:
                found.setdefault(NO_NAME.sub("_", str(source)), []).append(total)
        means = {f"val/reward/{source}/mean": mean([] if None in v else v) for source, v in found.items()}
        return means if len(means) > 1 else {}

    @property
    def unscored(self) -> int:
        """Return the samples whose total failed."""
        return len(self.failed)

    @property
    def failed(self) -> list[int]:
        """Return the rows whose total failed; a sample without scorers has neither a total nor a failure."""
        return [i for i, total in enumerate(self.totals) if total is None and self.failures[i]]

    @property
    def measured(self) -> int:
        """Return the samples that have or should have a total."""
        return sum(total is not None for total in self.totals) + self.unscored

    def _whole(self, config: RewardConfig, column: str, values: Sequence[float | None]) -> bool:
        """Whether all samples to which the scorer of `column` applies have a value."""
        scorer = config.scorers.get(column.split("/")[0])  # None: the total
        if scorer is None:
            return not self.failed
        prompts = (sample.prompt for sample, value in zip(self.samples, values, strict=True) if value is None)
        return not any(applies(scorer, prompt) for prompt in prompts)

    def _best(self, values: Sequence[float | None]) -> list[float]:
        groups: dict[Group, list[float]] = {}
        for sample, value in zip(self.samples, values, strict=True):
            if value is not None:
                groups.setdefault(sample.group, []).append(value)
        return [max(members) for members in groups.values()]

    def by_group(self) -> dict[Group, list[float | None]]:
        """Return the rewards of the images of each group."""
        rewards: dict[Group, list[float | None]] = {}
        for sample, total in zip(self.samples, self.totals, strict=True):
            rewards.setdefault(sample.group, []).append(total)
        return rewards

    def groups_with_signal(self) -> list[Group]:
        """Return the groups whose images all have a reward, not all equal."""
        return [group for group, values in self.by_group().items() if len(set(values)) > 1 and None not in values]


def mean(values: Sequence[float | bool | None]) -> float:
    """Return the mean of the values that are not None, NaN if all are."""
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else float("nan")
