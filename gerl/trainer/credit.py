"""From the scores of a step to the credit of its samples, and the metrics that describe both."""

import logging
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from gerl.algorithms import Algorithm, Rewards
from gerl.algorithms.core_algos import batch_advantages, group_advantages, group_ranks, zero_std_fraction
from gerl.algorithms.planning import group_ids
from gerl.config import Config, RewardConfig, ScorerConfig
from gerl.config.algorithm_keys import ShapedConfig
from gerl.config.remedies import doubters
from gerl.errors import RewardError
from gerl.protocol import Group, Sample, ScorerFailure, Scores
from gerl.rewards.checks import check_failures, unscored, usable_groups
from gerl.rewards.total import DATA_SOURCE, applies, shaped
from gerl.run.statistics import Estimate
from gerl.run.validation import held_out_words

logger = logging.getLogger(__name__)
Metrics = dict[str, float]
NO_NAME = re.compile(r"[^\w .:-]")  # what trackers do not take in the name of a metric, and the slash between its parts


@dataclass
class Scored:
    """The samples of a step in order, with what the scorers said about them."""

    samples: list[Sample] = field(default_factory=list)
    totals: list[float | None] = field(default_factory=list)
    by_scorer: dict[str, list[float | None]] = field(default_factory=dict)
    failures: list[list[ScorerFailure]] = field(default_factory=list)
    further_prompts: int = 0  # drawn by dynamic sampling

    def add(self, samples: Sequence[Sample], scores: Scores) -> None:
        """Append a micro-batch; a column that one of them lacks, because its scorer failed, has no values there."""
        for name in {**self.by_scorer, **scores.by_scorer}:
            known = self.by_scorer.setdefault(name, [None] * len(self.samples))
            known.extend(scores.by_scorer.get(name, [None] * len(samples)))
        self.samples += samples
        self.totals += scores.totals
        self.failures += scores.failures

    def metrics(self, config: RewardConfig, validation: bool = False) -> Metrics:
        """Mean of the total and of each score, the share of successes, and the mean best image of a group.

        Each over the samples that have one. In validation, where a prompt has one image and so no best, means are
        compared with those of other steps: one that lacks a failed prompt would be of other prompts, and is NaN. There
        is no total where only people score, who are asked in training only.
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
        """The mean total of each kind of held-out prompts, by their column `data_source`, if there are several."""
        found: dict[str, list[float | None]] = {}
        for sample, total, failures in zip(self.samples, self.totals, self.failures, strict=True):
            if total is None and not failures:  # nobody is asked about it
                continue
            if (source := sample.prompt.metadata.get(DATA_SOURCE)) is not None:
                found.setdefault(NO_NAME.sub("_", str(source)), []).append(total)
        means = {f"val/reward/{source}/mean": mean([] if None in v else v) for source, v in found.items()}
        return means if len(means) > 1 else {}

    @property
    def given(self) -> bool:
        """Whether the images are those of files, whose ranks and labels are no rewards."""
        return any(sample.given is not None for sample in self.samples)

    @property
    def unscored(self) -> int:
        """The samples whose total failed."""
        return len(self.failed)

    @property
    def failed(self) -> list[int]:
        """Those samples; one that no scorer is asked about has neither a total nor a failure."""
        return [i for i, total in enumerate(self.totals) if total is None and self.failures[i]]

    @property
    def measured(self) -> int:
        """The samples that have, or should have, a total."""
        return sum(total is not None for total in self.totals) + self.unscored

    def _whole(self, config: RewardConfig, column: str, values: Sequence[float | None]) -> bool:
        """Whether all samples have a value in `column` to which its scorer applies."""
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
        """The rewards of the images of each group."""
        rewards: dict[Group, list[float | None]] = {}
        for sample, total in zip(self.samples, self.totals, strict=True):
            rewards.setdefault(sample.group, []).append(total)
        return rewards

    def groups_with_signal(self) -> list[Group]:
        """The groups whose images all have a reward, and not all the same one."""
        return [group for group, values in self.by_group().items() if len(set(values)) > 1 and None not in values]


def scores_of(samples: Sequence[Sample], scores: Scores) -> Scores:
    """`scores`, in place of which images of files have what their files say of them."""
    given = [sample.given.score for sample in samples if sample.given is not None]
    return Scores(list(given), {}, [[] for _ in given]) if given else scores


def credit_step(
    config: Config, algorithm: Algorithm, scored: Scored, kl: Sequence[float] | None = None
) -> tuple[Metrics, torch.Tensor, torch.Tensor | None]:
    """The step's metrics, the credit `[B, T]` of its samples, NaN for those that are not trained on, and the gate.

    That is, with `algorithm.kl_share`, a factor `[B]` of their distances to the base model, else None. `kl`: these
    distances `[B]`, which the rewards pay for (`algorithm.kl_in_reward`). Raises `RewardError` as `usable_groups` does.
    """
    keep, report = usable_groups(scored.samples, scored.totals, scored.failures, config.reward)
    for sentence in report:
        logger.warning(sentence)
    kept = [i for i, usable in enumerate(keep) if usable]
    samples = [scored.samples[i] for i in kept]
    ids = group_ids(samples)
    weighted = {name: scorer for name, scorer in config.reward.scorers.items() if scorer.weight != 0}
    weighted = {} if scored.given else weighted
    weights = torch.tensor([scorer.weight for scorer in weighted.values()])
    parts = [_counted(s, [scored.by_scorer[n][i] for i in kept], ids) for n, s in weighted.items()]
    columns = torch.stack(parts, 1) if parts else torch.empty(len(kept), 0)
    totals = torch.tensor([total for i in kept if (total := scored.totals[i]) is not None])
    if any(scorer.normalise != "none" for scorer in weighted.values()):
        totals = columns @ weights
    metrics = scored.metrics(config.reward) | {
        "group/zero_std_fraction": zero_std_fraction(totals, ids),
        "group/dropped": float(len(report)),
    }
    gate: torch.Tensor | None = None
    if algorithm.gate is not None:
        gate = torch.zeros(len(keep))
        asked = doubters(config.algorithm, config.reward.scorers)
        gate[kept] = algorithm.gate.choose(totals, torch.stack([_column(scored, n, kept) for n in asked], 1))
        metrics |= {"group/kl_share": float(gate[kept].mean()), "group/kl_share_of_doubted": algorithm.gate.share}
    if not scored.given:
        metrics |= {"reward/std": float(totals.std(correction=0)), "reward/failures": float(scored.unscored)}
    if kl is not None:
        paid = torch.tensor(kl) if gate is None else gate * torch.tensor(kl)
        totals = totals - algorithm.kl_coef * paid[kept]
        metrics["reward/kl"] = mean(kl)
    diversity = None
    if isinstance(config.algorithm, ShapedConfig) and config.algorithm.diversity != "none":
        diversity = _diversity(config.algorithm, scored, kept)
        metrics["group/diversity"] = float(diversity.mean())
    credit = torch.full((len(keep), config.sampling.num_inference_steps), torch.nan)
    credit[kept] = algorithm.credit(Rewards(samples, totals, columns, weights, diversity))
    if config.algorithm.dynamic_sampling:
        chosen = set(scored.groups_with_signal()[: config.rollout.prompts_per_step])
        credit[[sample.group not in chosen for sample in scored.samples]] = torch.nan
        metrics["group/further_prompts"] = float(scored.further_prompts)
    return metrics, credit, gate


def _column(scored: Scored, name: str, rows: Sequence[int]) -> torch.Tensor:
    """The scores `[B]` of a column, NaN where there is none."""
    values = scored.by_scorer.get(name, [None] * len(scored.samples))
    return torch.tensor([torch.nan if (value := values[i]) is None else value for i in rows], dtype=torch.float64)


def _diversity(algorithm: ShapedConfig, scored: Scored, rows: Sequence[int]) -> torch.Tensor:
    """How unlike the others of its group each image is, `[B]`; raises `RewardError` where that is not known."""
    found = _column(scored, algorithm.diversity_scorer, rows)
    if missing := int(found.isnan().sum()):
        raise RewardError(
            f"algorithm.diversity={algorithm.diversity}: {algorithm.diversity_scorer} has no score for {missing} "
            f"of the step's {len(rows)} images; see the log for the reason, or use algorithm.diversity=none"
        )
    return found.float()


def conclude_validation(
    config: Config, scored: Scored, step: int, gain: Estimate | None = None
) -> tuple[Metrics, float | None]:
    """Log a validation; its metrics, and the mean reward, None unless all held-out images have one.

    gain: of the reward over the first validation. Raises `RewardError` if too many have none, or any has with
    `reward.on_error=stop`.
    """
    metrics, count, failed = scored.metrics(config.reward, validation=True), scored.measured, scored.unscored
    if not count:
        logger.info(
            "step %d: %d held-out prompts are sampled; no scorer with a weight scores them (people vote in "
            "training only)",
            *(step, len(scored.samples)),
        )
        return metrics, None
    if not failed:
        over = ""
        if gain is not None and not math.isnan(gain.low):
            over = f", {gain.mean:+.3f} over the first validation (95 % interval {gain.low:+.3f} to {gain.high:+.3f})"
        logger.info(
            "step %d: reward on %s %.3f%s",
            step,
            held_out_words(count, config.validation.images_per_prompt),
            metrics["val/reward/mean"],
            over,
        )
        return metrics, metrics["val/reward/mean"]
    i = scored.failed[0]
    first = unscored(f"held-out {scored.samples[i].prompt.text!r}", scored.failures[i])
    logger.warning(
        "step %d: reward on %d of %s %.3f, %d not scored; it is excluded from comparisons with other validations; %s",
        *(
            step,
            count - failed,
            held_out_words(count, config.validation.images_per_prompt),
            mean(scored.totals),
            failed,
            first,
        ),
    )
    totals = [
        scored.totals[k] for k in range(len(scored.samples)) if scored.totals[k] is not None or k in scored.failed
    ]
    check_failures(totals, first, config.reward, f"held-out images of step {step}", "let such prompts be skipped")
    return metrics, None


def _counted(scorer: ScorerConfig, scores: Sequence[float | None], ids: torch.Tensor) -> torch.Tensor:
    """A scorer's part of the total before its weight, `[B]`: shaped and normalised; 0 where it does not apply."""
    known = torch.tensor([score is not None for score in scores])
    values = torch.tensor([shaped(scorer, score) for score in scores if score is not None])
    match scorer.normalise:
        case "group":
            values = group_advantages(values, ids[known])
        case "batch":
            values = batch_advantages(values)
        case "rank":
            values = group_ranks(values, ids[known])
    return torch.zeros(len(scores)).masked_scatter(known, values)


def mean(values: Sequence[float | bool | None]) -> float:
    """Mean of the values there are, NaN if there are none."""
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else float("nan")
