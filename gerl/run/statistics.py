"""Means with their confidence intervals, by the bootstrap."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A mean over `count` prompts with its 95 % confidence interval; NaN where there are too few prompts for it."""

    mean: float
    low: float
    high: float
    count: int


def bootstrap(values: Sequence[float], confidence: float = CONFIDENCE, seed: int = 0) -> tuple[float, float]:
    """The percentile interval of the mean of `values` [N] (Efron and Tibshirani 1993, section 13.3).

    The ends are quantiles of the means of 10,000 samples of size N drawn with replacement from `values`; the same for
    the same values.
    """
    return bootstrap_groups([values], confidence, seed)


def bootstrap_groups(
    groups: Sequence[Sequence[float]], confidence: float = CONFIDENCE, seed: int = 0
) -> tuple[float, float]:
    """As `bootstrap`, of the mean of the means of `groups`, each of which is resampled by itself."""
    generator = np.random.default_rng(seed)
    means = np.mean([_resampled(np.asarray(group, dtype=np.float64), generator) for group in groups], axis=0)
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def _resampled(data: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """The means of samples of the size of `data` [N], drawn from it with replacement [RESAMPLES]."""
    chunk = max(1, 2**20 // len(data))  # resamples at a time, to bound the memory
    sizes = [min(chunk, RESAMPLES - start) for start in range(0, RESAMPLES, chunk)]
    means = [data[generator.integers(len(data), size=(size, len(data)))].mean(axis=1) for size in sizes]
    return np.concatenate(means)


def estimate(prompt_ids: Sequence[int], values: Sequence[float | None]) -> Estimate:
    """Mean and interval of `values` [N], one for each image; those that are None are left out.

    Images of the same prompt are averaged first: they are not independent, so prompts are what is resampled.
    """
    prompts: dict[int, list[float]] = {}
    for i, value in zip(prompt_ids, values, strict=True):
        if value is not None:
            prompts.setdefault(i, []).append(value)
    means = [sum(members) / len(members) for members in prompts.values()]
    low, high = bootstrap(means) if len(means) > 1 else (math.nan, math.nan)
    return Estimate(sum(means) / len(means) if means else math.nan, low, high, len(means))


def share_interval(count: int, total: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """The exact interval of a share of which `count` in `total` were seen (Clopper and Pearson 1934), by bisection."""
    rare = (1 - confidence) / 2

    def tail(p: float, low: int, high: int) -> float:
        return sum(math.comb(total, k) * p**k * (1 - p) ** (total - k) for k in range(low, high + 1))

    def solve(too_small: Callable[[float], bool]) -> float:
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if too_small(middle) else (low, middle)
        return low

    first = 0.0 if count == 0 else solve(lambda p: tail(p, count, total) < rare)
    last = 1.0 if count == total else solve(lambda p: tail(p, 0, count) > rare)
    return first, last
