"""How far the gradients of independent batches agree: statistics of their inner products.

Two gradients g + n of the same expected gradient g and independent noise n have a cosine of about |g|^2 / (|g|^2 +
|n|^2) in thousands of dimensions: the share of the signal in one batch. With B times the images the noise has a B-th of
the variance, so cos(B) = 1 / (1 + (1 / cos - 1) / B).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

CHUNK = 2**18  # parameters whose products are added up at a time


@dataclass(frozen=True)
class Cosine:
    """The mean cosine over pairs of batches. `error`: its standard error, None where two batches are all."""

    mean: float
    error: float | None

    @property
    def highest(self) -> float:
        """Two standard errors above the mean: it may well be as high."""
        return self.mean + 2 * (self.error or 0.0)


def inner_products(batches: Sequence[Mapping[int, torch.Tensor]], steps: Sequence[int]) -> torch.Tensor:
    """`[N, N, T, T]` fp64: of the gradient of batch a at step j with that of batch b at step k, for `steps` `[T]`.

    batches: N mappings from a step to its gradient `[P]`; a step that is not in one has the gradient 0 there.
    """
    count, rows = len(batches), [batch.get(k) for batch in batches for k in steps]
    size = max((len(row) for row in rows if row is not None), default=0)
    products = torch.zeros(len(rows), len(rows), dtype=torch.float64)
    for start in range(0, size, CHUNK):  # in fp64 all at once would not fit where a LoRA is large
        length = min(CHUNK, size - start)
        empty = torch.zeros(length, dtype=torch.float64)
        part = torch.stack([empty if row is None else row[start : start + length].double() for row in rows])
        products += part @ part.T
    return products.view(count, len(steps), count, len(steps)).permute(0, 2, 1, 3)


def combined(products: torch.Tensor, factors: Sequence[float]) -> torch.Tensor:
    """`[N, N]`: the inner products of sum_k factors_k g_k, from those of the steps, `[N, N, T, T]`."""
    c = torch.tensor(list(factors), dtype=torch.float64)
    return torch.einsum("j,abjk,k->ab", c, products, c)


def cosine(products: torch.Tensor) -> Cosine | None:
    """The mean cosine over pairs of batches, from their inner products `[N, N]`; None if there is no pair.

    A batch whose gradient is 0 has no direction and is left out. The standard error is the jackknife's over batches:
    pairs that share a batch are not independent.
    """
    norms = products.diagonal().sqrt()
    known = [int(i) for i in (norms > 0).nonzero()]
    if len(known) < 2:
        return None
    cosines = (products / (norms[:, None] * norms))[known][:, known]

    def mean(members: Sequence[int]) -> float:
        pairs = [float(cosines[a, b]) for i, a in enumerate(members) for b in members[i + 1 :]]
        return sum(pairs) / len(pairs)

    everyone = list(range(len(known)))
    if len(known) == 2:
        return Cosine(mean(everyone), None)
    without = [mean([b for b in everyone if b != a]) for a in everyone]
    centre = sum(without) / len(without)
    variance = (len(known) - 1) / len(known) * sum((value - centre) ** 2 for value in without)
    return Cosine(mean(everyone), math.sqrt(variance))


def larger_batch(cosine: float, wanted: float = 0.5) -> float | None:
    """How many times as many images a batch needs for gradients that agree by `wanted`; None if no number is enough."""
    if cosine <= 0:
        return None
    return (1 / cosine - 1) / (1 / wanted - 1) if cosine < 1 else 0.0


def clearly_above(candidate: Cosine, configured: Cosine) -> bool:
    """Whether it is above by more than both standard errors, and above 0 by two of its own.

    Where there are no standard errors it is not known, hence not so.
    """
    if candidate.error is None or configured.error is None or candidate.mean <= 2 * candidate.error:
        return False
    return candidate.mean - configured.mean > candidate.error + configured.error
