"""From the scores of a step to the credit of its samples, and the metrics that describe both."""

import logging
from collections.abc import Sequence

import torch

from gerl.algorithms import Algorithm, Rewards
from gerl.algorithms.core_algos import batch_advantages, group_advantages, group_ranks, zero_std_fraction
from gerl.algorithms.planning import group_ids
from gerl.config import Config, ScorerConfig
from gerl.config.algorithms import ShapedConfig
from gerl.errors import RewardError
from gerl.protocol import Sample, Scores
from gerl.rewards.checks import usable_groups
from gerl.rewards.total import shaped
from gerl.trainer.step import Metrics, ScoreTable

logger = logging.getLogger(__name__)


def scores_of(samples: Sequence[Sample], scores: Scores) -> Scores:
    """`scores`, in place of which images of files have what their files say of them."""
    given = [sample.given.score for sample in samples if sample.given is not None]
    return Scores(list(given), {}, [[] for _ in given]) if given else scores


def usable_rewards(config: Config, scores: ScoreTable) -> tuple[Rewards, Metrics]:
    """The rewards of the samples that can be trained on, and the metrics of the step's scores.

    Raises `RewardError` as `usable_groups` does, or where a score that the algorithm needs is missing.
    """
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
    metrics = scores.metrics(config.reward) | {
        "group/zero_std_fraction": zero_std_fraction(totals, ids),
        "group/dropped": float(len(report)),
    }
    if not scores.given:
        metrics |= {"reward/std": float(totals.std(correction=0)), "reward/failures": float(scores.unscored)}
    diversity = None
    if isinstance(config.algorithm, ShapedConfig) and config.algorithm.diversity != "none":
        diversity = _diversity(config.algorithm, scores, rows)
        metrics["group/diversity"] = float(diversity.mean())
    return Rewards(samples, totals, columns, weights, diversity, rows), metrics


def credit_of(config: Config, algorithm: Algorithm, scores: ScoreTable, rewards: Rewards) -> torch.Tensor:
    """The credit of a step's samples, `[B, T]`, NaN for those that are not trained on."""
    credit = torch.full((len(scores.samples), config.sampling.num_inference_steps), torch.nan)
    credit[list(rewards.rows)] = algorithm.credit(rewards)
    return credit


def column(scores: ScoreTable, name: str, rows: Sequence[int]) -> torch.Tensor:
    """The scores `[B]` of a column, NaN where there is none."""
    values = scores.by_scorer.get(name, [None] * len(scores.samples))
    return torch.tensor([torch.nan if (value := values[i]) is None else value for i in rows], dtype=torch.float64)


def _diversity(algorithm: ShapedConfig, scores: ScoreTable, rows: Sequence[int]) -> torch.Tensor:
    """How unlike the others of its group each image is, `[B]`; raises `RewardError` where that is not known."""
    found = column(scores, algorithm.diversity_scorer, rows)
    if missing := int(found.isnan().sum()):
        raise RewardError(
            f"algorithm.diversity={algorithm.diversity}: {algorithm.diversity_scorer} has no score for {missing} "
            f"of the step's {len(rows)} images; see the log for the reason, or use algorithm.diversity=none"
        )
    return found.float()


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
