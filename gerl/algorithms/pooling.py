"""Losses over groups whose images are not all in one micro-batch.

A group may be larger than what fits into a backward pass, or lie on several workers. What the other images contribute
to an image's loss (the weight of DGPO, the mean of CRD, the other half of a pair) is a constant there: a first pass
without gradient over the whole group finds it, as the sum of one number per image at each noise level.
"""

from collections.abc import Iterable, Sequence

import torch

from gerl.protocol import Group, Sample

Pooled = dict[tuple[Group, int], tuple[float, int]]  # group and noise level -> sum over its images, their number
Sums = tuple[torch.Tensor, torch.Tensor]  # [B] sum over the group of each row, [B] number of rows that it is of


def pooled_sum(parts: Iterable[Pooled]) -> Pooled:
    """The sums over micro-batches and workers."""
    found: Pooled = {}
    for part in parts:
        for key, (total, count) in part.items():
            before, known = found.get(key, (0.0, 0))
            found[key] = before + total, known + count
    return found


def pooled_rows(values: torch.Tensor, samples: Sequence[Sample], level: int) -> Pooled:
    """The sums of the values `[B]` of samples at noise level `level`, in fp64."""
    rows = zip(samples, values.double().tolist(), strict=True)
    return pooled_sum({(sample.group, level): (value, 1)} for sample, value in rows)


def group_sums(pooled: Pooled, samples: Sequence[Sample], level: int, like: torch.Tensor) -> Sums:
    """For each sample the sum over its group and the number of images in it: `[B]` each, as `like`."""
    sums, counts = zip(*(pooled[sample.group, level] for sample in samples), strict=True)
    return like.new_tensor(sums), like.new_tensor(counts)
