"""From the scores of a step to the credit of its samples, and the metrics that describe both."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from gerl.algorithms import Algorithm, Rewards
from gerl.config import Config
from gerl.protocol import Group, Sample, ScorerFailure, Scores
from gerl.trainer.ppo.core_algos import zero_std_fraction
from gerl.trainer.ppo.reward import usable_groups
from gerl.utils.planning import group_ids

logger = logging.getLogger(__name__)
Metrics = dict[str, float]


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

    def means(self, prefix: str = "") -> Metrics:
        """Mean total and mean of each scorer over the samples that have one."""
        columns = {"reward": self.totals, **self.by_scorer}
        names = {name: f"{prefix}{name}/mean" for name in columns}
        if not prefix:
            names = {name: "reward/mean" if name == "reward" else f"reward/{name}/mean" for name in columns}
        return {names[name]: mean(values) for name, values in columns.items()}

    def groups_with_signal(self) -> list[Group]:
        """The groups whose images all have a reward, and not all the same one."""
        rewards: dict[Group, set[float | None]] = {}
        for sample, total in zip(self.samples, self.totals, strict=True):
            rewards.setdefault(sample.group, set()).add(total)
        return [group for group, values in rewards.items() if len(values) > 1 and None not in values]


def credit_step(
    config: Config, algorithm: Algorithm, scored: Scored, kl: Sequence[float] | None = None
) -> tuple[Metrics, torch.Tensor]:
    """The step's metrics, and the credit `[B, T]` of its samples, NaN for those that are not trained on.

    `kl`: distances `[B]` to the base model, which the rewards pay for (`algorithm.kl_in_reward`). Raises `RewardError`
    as `usable_groups` does.
    """
    keep, report = usable_groups(scored.samples, scored.totals, scored.failures, config.reward.on_error)
    for sentence in report:
        logger.warning(sentence)
    kept = [i for i, usable in enumerate(keep) if usable]
    samples = [scored.samples[i] for i in kept]
    totals = _column(scored.totals, kept)
    metrics = scored.means() | {
        "reward/std": float(totals.std(correction=0)),
        "reward/failures": float(sum(total is None for total in scored.totals)),
        "group/zero_std_fraction": zero_std_fraction(totals, group_ids(samples)),
        "group/dropped": float(len(report)),
    }
    weights = {name: scorer.weight for name, scorer in config.reward.scorers.items() if scorer.weight != 0}
    columns = torch.stack([_column(scored.by_scorer[name], kept) for name in weights], dim=1)
    if kl is not None:
        totals = totals - config.algorithm.kl_coef * torch.tensor([kl[i] for i in kept])
        metrics["reward/kl"] = mean(kl)
    credit = torch.full((len(keep), config.sampling.num_inference_steps), torch.nan)
    credit[kept] = algorithm.credit(Rewards(samples, totals, columns, torch.tensor(list(weights.values()))))
    if config.algorithm.dynamic_sampling:
        chosen = set(scored.groups_with_signal()[: config.rollout.prompts_per_step])
        credit[[sample.group not in chosen for sample in scored.samples]] = torch.nan
        metrics["group/further_prompts"] = float(scored.further_prompts)
    return metrics, credit


def _column(values: Sequence[float | None], rows: Sequence[int]) -> torch.Tensor:
    return torch.tensor([value for i in rows if (value := values[i]) is not None])


def mean(values: Sequence[float | None]) -> float:
    """Mean of the values there are, NaN if there are none."""
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else float("nan")
