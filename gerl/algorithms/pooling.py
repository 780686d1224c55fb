"""Losses over groups whose images are not all in one micro-batch.

A group may be larger than what fits into a backward pass, or lie on several workers. What the other images contribute
to an image's loss (the weight of DGPO, the mean of CRD, the other half of a pair) is a constant there: a first pass
without gradient over the whole group finds it, as the sum of a number, or of several, per image at each noise level.
"""

from collections.abc import Iterable, Sequence

import torch

from gerl.protocol import Group, Sample

# group and noise level -> sum over its images (of a number each, or of n: fp64 [n]), their number
Pooled = dict[tuple[Group, int], tuple[float | torch.Tensor, int]]
Sums = tuple[torch.Tensor, torch.Tensor]  # [B] or [B, n] sum over the group of each row, [B] number of its rows


def pooled_sum(parts: Iterable[Pooled]) -> Pooled:
    """The sums over micro-batches and workers."""
    found: Pooled = {}
    for part in parts:
        for key, (total, count) in part.items():
            before, known = found.get(key, (0.0, 0))
            found[key] = before + total, known + count
    return found


def pooled_rows(values: torch.Tensor, samples: Sequence[Sample], level: int) -> Pooled:
    """The sums of the values `[B]` or `[B, n]` of samples at noise level `level`, in fp64."""
    values = values.double().cpu()
    rows = zip(samples, values.tolist() if values.ndim == 1 else values, strict=True)
    return pooled_sum({(sample.group, level): (value, 1)} for sample, value in rows)


def group_sums(pooled: Pooled, samples: Sequence[Sample], level: int, like: torch.Tensor) -> Sums:
    """For each sample the sum over its group, `[B]` or `[B, n]`, and the number of images in it, `[B]`, as `like`."""
    sums, counts = zip(*(pooled[sample.group, level] for sample in samples), strict=True)
    totals = torch.stack([torch.as_tensor(total, dtype=torch.float64) for total in sums])
    return totals.to(like), like.new_tensor(counts)
