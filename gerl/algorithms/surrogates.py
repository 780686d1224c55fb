"""Draws and weights of the algorithms that differentiate rewards: which steps have a gradient, and how much of it.

All draws are from seeds, the same for all images of a trainer step.
"""

from collections.abc import Sequence

import numpy as np

from gerl.utils.seeding import derive_seed


def generator(*seed: int | str) -> np.random.Generator:
    """Of the draws of a trainer step."""
    return np.random.default_rng(derive_seed("gradient", *seed))


def drawn_length(mean: int, std: float, total: int, draw: np.random.Generator) -> int:
    """A number of steps in 1 to `total`, normal around `mean` and drawn again until it is one; `mean` at std 0."""
    while std > 0:
        length = round(draw.normal(mean, std))
        if 1 <= length <= total:
            return length
    return min(mean, total)


def late_biased(steps: range, count: int, bias: float, draw: np.random.Generator) -> list[int]:
    """`count` different ones of `steps`, in order; the i-th of them, from 1, is drawn with weight i to the `bias`."""
    count = min(count, len(steps))
    weights = np.arange(1, len(steps) + 1, dtype=np.float64) ** bias
    chosen = draw.choice(len(steps), count, replace=False, p=weights / weights.sum())
    return sorted(steps[int(i)] for i in chosen)


def evenly_spread(total: int, count: int, draw: np.random.Generator) -> list[int]:
    """`count` of the first `total` steps at equal distances, from a first one that is drawn."""
    count = min(count, total)
    stride = total // count
    first = int(draw.integers(total - (count - 1) * stride))
    return [first + i * stride for i in range(count)]


def two_steps(total: int, draw: np.random.Generator) -> tuple[int, int]:
    """Two different ones of `total` steps, in order, every pair as likely."""
    k, j = sorted(draw.choice(total, 2, replace=False).tolist())
    return k, j


def parted_steps(total: int, parts: Sequence[float], latest: int | None, draw: np.random.Generator) -> tuple[int, int]:
    """Two of `total` steps, k < j: steps after j, from k to j, and up to k, shared by a Dirichlet distribution.

    Each share is at least one step, so j is not the last. j is one of the last `latest` steps: what is above goes to
    the share up to k.
    """
    shares = draw.dirichlet(parts)
    counts = np.round(shares * total).astype(int)
    counts[shares.argmax()] += total - counts.sum()
    counts = counts.clip(min=1)
    counts[counts.argmax()] += total - counts.sum()
    after, between, _ = counts.tolist()
    j = total - 1 - min(after, max(1, (latest or total) - 1))
    return j - between, j


def split_count(count: int, before: int, after: int) -> tuple[int, int]:
    """`count` active steps shared among `before` and `after` steps by their numbers, at least one each."""
    count = min(count, before + after)
    first = min(max(round(count * before / (before + after)), 1, count - after), before, count - 1)
    return first, count - first


def scale_up(lengths: Sequence[float], active: Sequence[int], rescale: float) -> float:
    """1 + `rescale` times what the way of all steps exceeds that of the `active` ones, to the latter."""
    whole, part = sum(map(abs, lengths)), sum(abs(lengths[k]) for k in active)
    return 1 + rescale * (whole / part - 1)


def spread_supports(start: int, end: int, count: int) -> list[int]:
    """At most `count` steps of [start, end), evenly spread; the first is `start`."""
    if end - start <= count:
        return list(range(start, end))
    places = np.linspace(0, end - start - 1, count).round().astype(int).tolist()
    return sorted({start, *(start + p for p in places[1:])})


def lagrange_weights(points: Sequence[float], start: float, end: float) -> list[float]:
    """The integrals from `start` to `end` of the Lagrange polynomials through `points`, which are all different."""
    weights = []
    for i, point in enumerate(points):
        others = [other for j, other in enumerate(points) if j != i]
        basis = np.poly1d(others, r=True) if others else np.poly1d([1.0])
        integral = np.polyint(basis)
        weights.append(float((integral(end) - integral(start)) / np.prod([point - other for other in others])))
    return weights
