"""Turn the scores of a step into the credit of its samples; the metrics of both."""

import logging
from collections.abc import Sequence

import torch

from gerl.algorithms import Algorithm, Rewards
from gerl.algorithms.base import ShapedConfig
from gerl.algorithms.core_algos import batch_advantages, group_advantages, group_ranks, zero_std_fraction
from gerl.algorithms.planning import group_ids
from gerl.config import Config, ScorerConfig
from gerl.errors import RewardError
from gerl.protocol import Sample, Scores
from gerl.rewards.total import rescaled, usable_groups
from gerl.trainer.step import Metrics, ScoreTable

logger = logging.getLogger(__name__)


def scores_of(samples: Sequence[Sample], scores: Scores) -> Scores:
    """Return `scores`; dataset images have the scores of their files instead."""
    given = [sample.dataset_image.score for sample in samples if sample.dataset_image is not None]
    return Scores(list(given), {}, [[] for _ in given]) if given else scores


def usable_rewards(config: Config, scores: ScoreTable) -> tuple[Rewards, Metrics]:
    """Return the rewards of the trainable samples and the metrics of the step's scores.

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
    """Compute the credit `[B, T]` of a step's samples, NaN where a sample is not trained on."""
    credit = torch.full((len(scores.samples), config.sampling.num_inference_steps), torch.nan)
    credit[list(rewards.rows)] = algorithm.credit(rewards)
    return credit


def column(scores: ScoreTable, name: str, rows: Sequence[int]) -> torch.Tensor:
    """Return the scores `[B]` of a column, NaN where a score is missing."""
    values = scores.by_scorer.get(name, [None] * len(scores.samples))
    return torch.tensor([torch.nan if (value := values[i]) is None else value for i in rows], dtype=torch.float64)


def _diversity(algorithm: ShapedConfig, scores: ScoreTable, rows: Sequence[int]) -> torch.Tensor:
    """Return each image's dissimilarity to the rest of its group, `[B]`; raises `RewardError` if one is missing."""
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
    values = torch.tensor([rescaled(scorer, score) for score in scores if score is not None])
    match scorer.normalise:
        case "group":
            values = group_advantages(values, ids[known])
        case "batch":
            values = batch_advantages(values)
        case "rank":
            values = group_ranks(values, ids[known])
    return torch.zeros(len(scores)).masked_scatter(known, values)
