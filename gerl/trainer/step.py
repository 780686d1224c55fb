"""The value that moves through the training loop, the metrics of its scores, and the credit of its samples."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

import torch

from gerl.algorithms import Algorithm, Rewards
from gerl.algorithms.base import ShapedConfig, group_ids
from gerl.algorithms.core_algos import batch_advantages, group_advantages, group_ranks, zero_std_fraction
from gerl.config import Config, RewardConfig, ScorerConfig
from gerl.errors import RewardError
from gerl.progress import Stopwatch
from gerl.protocol import DATA_SOURCE, Group, RolloutTask, Sample, ScorerFailure, Scores, UpdateStats
from gerl.rewards.total import applies, metric_name, rescaled
from gerl.run.attempts import SUCCESS, attempts

if TYPE_CHECKING:
    from gerl.cluster import Pending
    from gerl.protocol import Images
    from gerl.run.checkpoint import Checkpoint
    from gerl.run.guard import Signal
    from gerl.run.validation import Validation

logger = logging.getLogger(__name__)
Metrics = dict[str, float]


@dataclass
class Step:
    """One iteration of the trainer.

    Example: step 12 of a run with 2 prompts x 3 images has 6 rows in `scores`, and `credit` of shape [6, 10] for 10
    denoising steps, NaN where a sample or a denoising step is not trained. Step 0 is the validation before training.
    """

    number: int
    watch: Stopwatch
    tasks: list[RolloutTask] = field(default_factory=list)
    images: list[Pending[Images]] = field(default_factory=list)  # of the tasks
    scores: Scores = field(default_factory=Scores)
    round: Sequence[RolloutTask] = ()  # tasks of the last round of sampling
    rounds: int = 0  # several with dynamic sampling, and one per turn of an episode
    rewards: Rewards | None = None  # of the trainable samples
    credit: torch.Tensor | None = None  # [B, T]
    kl_weight: torch.Tensor | None = None  # [B] factors of the KL to the reference; None: 1
    stats: UpdateStats = field(default_factory=UpdateStats)  # of the optimizer steps
    lag: int = 0  # finished steps between rollout and update; 0 is on-policy
    taken: bool = False  # the run's state includes its update
    validation: Validation | None = None  # after it
    look: Validation | None = None  # after it, if no validation was due
    signals: list[Signal] = field(default_factory=list)  # signs of reward hacking in the validation or look
    directives: list[Directive] = field(default_factory=list)  # of extensions, followed once the step is logged
    metrics: Metrics = field(default_factory=dict)

    def restart(self) -> None:
        """Reset the step to be repeated, unless its update is finished."""
        if not self.taken:
            new = Step(self.number, Stopwatch(self.watch.timeline))
            for each in fields(self):
                setattr(self, each.name, getattr(new, each.name))


# --- What an extension asks of the loop after a step


@dataclass(frozen=True)
class Save:
    """Request a checkpoint of the step."""


@dataclass(frozen=True)
class Stop:
    """End the run with `error`, after a checkpoint if one is due."""

    error: Exception


@dataclass(frozen=True)
class RollBack:
    """Return to `checkpoint` because of `signals`, and continue with `kl_coef` as the weight of the KL.

    `kl_coef`: None keeps that of the checkpoint. `error`: ends the run there.
    """

    checkpoint: Checkpoint
    kl_coef: float | None
    signals: tuple[Signal, ...]
    error: Exception | None = None


Directive = Save | Stop | RollBack


# --- Metrics of the scores


def reward_metrics(scores: Scores, config: RewardConfig, validation: bool = False) -> Metrics:
    """Return the mean of the total and of each score, the success rate, and the mean best image of a group.

    Each over the samples that have a value. Means of validations are compared between steps, so a mean that lacks
    a failed prompt is NaN. Their success rates have an interval, and with several images per prompt also pass@k. Failed
    images are counted. Without a total if only people score, who vote in training only.
    """
    failures = "val/failures" if validation else "reward/failures"
    metrics: Metrics = {} if scores.given else {failures: float(scores.unscored)}
    total = {"reward": scores.totals} if scores.measured and not scores.given else {}
    for name, values in {**total, **scores.by_scorer}.items():
        key = f"val/{name}" if validation else "reward" if name == "reward" else f"reward/{name}"
        if validation and not _is_whole(scores, config, name, values):
            values = []
        metrics[f"{key}/mean"] = mean(values)
        success = None if (scorer := config.scorers.get(name)) is None else scorer.success
        if validation:
            metrics |= _attempts(key, scores, values or [None] * len(scores.samples), success)
            continue
        metrics[f"{key}/best_of_n"] = mean(_best(scores, values))
        if success is not None:
            metrics[f"{key}/success_rate"] = mean([None if v is None else v >= success for v in values])
    return metrics | (_by_source(scores) if validation else {})


def _by_source(scores: Scores) -> Metrics:
    """Return the mean total of each `data_source` of the held-out prompts, if there are several."""
    by_source: dict[str, list[float | None]] = {}
    for sample, total, failures in zip(scores.samples, scores.totals, scores.failures, strict=True):
        if total is None and not failures:  # no scorer applies
            continue
        if (source := sample.prompt.metadata.get(DATA_SOURCE)) is not None:
            by_source.setdefault(metric_name(source), []).append(total)
    means = {f"val/reward/{source}/mean": mean([] if None in v else v) for source, v in by_source.items()}
    return means if len(means) > 1 else {}


def _is_whole(scores: Scores, config: RewardConfig, column: str, values: Sequence[float | None]) -> bool:
    """Whether all samples to which the scorer of `column` applies have a value."""
    scorer = config.scorers.get(column.split("/")[0])  # None: the total
    if scorer is None:
        return not scores.failed
    prompts = (sample.prompt for sample, value in zip(scores.samples, values, strict=True) if value is None)
    return not any(applies(scorer, prompt) for prompt in prompts)


def _attempts(key: str, scores: Scores, values: Sequence[float | None], success: float | None) -> Metrics:
    """Return the mean of each column of `gerl.run.attempts`, and the 95 % interval of the success rate."""
    metrics: Metrics = {}
    for name, rates in attempts([sample.prompt.id for sample in scores.samples], values, success).items():
        e = rates.estimate()
        metrics[f"{key}/{name}"] = e.mean
        if name == SUCCESS and not math.isnan(e.low):
            metrics |= {f"{key}/{name}_low": e.low, f"{key}/{name}_high": e.high}
    return metrics


def _best(scores: Scores, values: Sequence[float | None]) -> list[float]:
    groups: dict[Group, list[float]] = {}
    for sample, value in zip(scores.samples, values, strict=True):
        if value is not None:
            groups.setdefault(sample.group, []).append(value)
    return [max(members) for members in groups.values()]


def mean(values: Sequence[float | bool | None]) -> float:
    """Return the mean of the values that are not None, NaN if all are."""
    numbers = [v for v in values if v is not None]
    return sum(numbers) / len(numbers) if numbers else float("nan")


# --- Credit of the samples


def usable_rewards(config: Config, scores: Scores) -> tuple[Rewards, Metrics]:
    """Return the rewards of trainable samples and the step's metrics; raises `RewardError` if scores are missing."""
    keep, report = usable_groups(scores.samples, scores.totals, scores.failures, config.reward)
    for sentence in report:
        logger.warning(sentence)
    rows = [i for i, usable in enumerate(keep) if usable]
    samples = [scores.samples[i] for i in rows]
    ids = group_ids(samples)
    weighted = {name: scorer for name, scorer in config.reward.scorers.items() if scorer.weight != 0}
    weighted = {} if scores.given else weighted
    weights = torch.tensor([scorer.weight for scorer in weighted.values()])
    parts = [_counted(s, [scores.by_scorer[n][i] for i in rows], ids) for n, s in weighted.items()]
    columns = torch.stack(parts, 1) if parts else torch.empty(len(rows), 0)
    totals = torch.tensor([total for i in rows if (total := scores.totals[i]) is not None])
    if any(scorer.normalise != "none" for scorer in weighted.values()):
        totals = columns @ weights
    metrics = reward_metrics(scores, config.reward) | {
        "group/zero_std_fraction": zero_std_fraction(totals, ids),
        "group/dropped": float(len(report)),
    }
    if not scores.given:
        metrics["reward/std"] = float(totals.std(correction=0))
    diversity = None
    if isinstance(config.algorithm, ShapedConfig) and config.algorithm.diversity != "none":
        diversity = _diversity(config.algorithm, scores, rows)
        metrics["group/diversity"] = float(diversity.mean())
    return Rewards(samples, totals, columns, weights, diversity, rows), metrics


def credit_of(config: Config, algorithm: Algorithm, scores: Scores, rewards: Rewards) -> torch.Tensor:
    """Compute the credit `[B, T]` of a step's samples, NaN where a sample is not trained on."""
    credit = torch.full((len(scores.samples), config.sampling.num_inference_steps), torch.nan)
    credit[list(rewards.rows)] = algorithm.credit(rewards)
    return credit


def column(scores: Scores, name: str, rows: Sequence[int]) -> torch.Tensor:
    """Return the scores `[B]` of a column, NaN where a score is missing."""
    values = scores.by_scorer.get(name, [None] * len(scores.samples))
    return torch.tensor([torch.nan if (value := values[i]) is None else value for i in rows], dtype=torch.float64)


def _diversity(algorithm: ShapedConfig, scores: Scores, rows: Sequence[int]) -> torch.Tensor:
    """Return each image's dissimilarity to the rest of its group, `[B]`; raises `RewardError` if one is missing."""
    diversity = column(scores, algorithm.diversity_scorer, rows)
    if missing := int(diversity.isnan().sum()):
        raise RewardError(
            f"algorithm.diversity={algorithm.diversity}: {algorithm.diversity_scorer} has no score for {missing} "
            f"of the step's {len(rows)} images; see the log for the reason, or use algorithm.diversity=none"
        )
    return diversity.float()


def _counted(scorer: ScorerConfig, scores: Sequence[float | None], ids: torch.Tensor) -> torch.Tensor:
    """A scorer's part of the total before its weight, `[B]`: shaped and normalised; 0 where it does not apply."""
    is_scored = torch.tensor([score is not None for score in scores])
    values = torch.tensor([rescaled(scorer, score) for score in scores if score is not None])
    match scorer.normalise:
        case "group":
            values = group_advantages(values, ids[is_scored])
        case "batch":
            values = batch_advantages(values)
        case "rank":
            values = group_ranks(values, ids[is_scored])
    return torch.zeros(len(scores)).masked_scatter(is_scored, values)


# --- Images without a score in training: their groups are dropped, or the run stops


def usable_groups(
    samples: Sequence[Sample],
    totals: Sequence[float | None],
    failures: Sequence[Sequence[ScorerFailure]],
    config: RewardConfig,
) -> tuple[list[bool], list[str]]:
    """Return which samples `[B]` can be trained on, and one sentence for each group that cannot.

    A sample without a total drops its whole group, because mean and standard deviation of the group would change.
    `samples`, `totals` and `failures` belong to one step, in the same order.

    Raises:
        RewardError: a sample failed and `reward.on_error` is `stop`, more than `reward.max_failed` of them failed, or
        no group is left.
    """
    dropped: dict[Group, str] = {}
    for sample, total, causes in zip(samples, totals, failures, strict=True):
        if total is None and sample.group not in dropped:
            dropped[sample.group] = failure_text(f"image {sample.index} of {sample.prompt.text!r}", causes)
    if dropped:
        first = next(iter(dropped.values()))
        check_failures(totals, first, config, f"images of step {samples[0].step}", "let such groups be dropped")
    keep = [sample.group not in dropped for sample in samples]
    if not any(keep):
        raise RewardError(
            f"no group of step {samples[0].step} has all its scores, so there is nothing to train on; the first "
            f"failure: {next(iter(dropped.values()))}; fix the scorer"
        )
    return keep, [f"group dropped: {reason}" for reason in dropped.values()]


def failure_text(image: str, causes: Sequence[ScorerFailure]) -> str:
    """Describe the first failure that explains an image's missing total."""
    return f"scorer {causes[0].scorer} has no score for {image}: {causes[0].reason}"


def check_failures(totals: Sequence[float | None], first: str, config: RewardConfig, images: str, instead: str) -> None:
    """Raise `RewardError` if too many of `totals` `[B]` are missing, or any is and `reward.on_error` is `stop`.

    `first` is the first failure, `images` names the scored images, `instead` the effect of
    `reward.on_error=drop_group`.
    """
    failed = sum(total is None for total in totals) / len(totals)
    if failed and config.on_error == "stop":
        raise RewardError(f"{first}; fix the scorer, or {instead} with reward.on_error=drop_group")
    if failed > config.max_failed:
        raise RewardError(
            f"{failed:.0%} of the {images} have no reward, more than reward.max_failed={config.max_failed:g}; the "
            f"first failure: {first}; fix the scorer and resume with checkpoint.resume=auto"
        )
