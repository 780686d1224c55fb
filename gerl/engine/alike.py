"""Rows of a denoiser call that are the same are computed once.

Where trajectories part, they are at the same latents: the children of a branch, or the images of a group that start
from one noise at their first noisy step. If all that the denoiser is called with is the same for them, so is what it
says: one row of each kind runs and stands for the others, and in the backward pass their gradients meet in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.utils._pytree import tree_leaves

from gerl.engine.batching import map_rows, same, take
from gerl.engine.tape import ComponentCall

KEY = 16  # values of a row by which rows are told apart before they are compared


def first_of_kind(x: torch.Tensor) -> list[int]:
    """For each row of `x` `[B, ...]` the first one that equals it."""
    flat = x.flatten(1)
    keys = flat[:, :: max(1, flat.shape[1] // KEY)].tolist()
    first: dict[tuple[float, ...], int] = {}
    found = [first.setdefault(tuple(key), i) for i, key in enumerate(keys)]
    return [j if j == i or torch.equal(flat[i], flat[j]) else i for i, j in enumerate(found)]


def once_per_kind(
    of_rows: Callable[[int], Callable[..., object]],
    kinds: Sequence[int],
    recorded: ComponentCall,
    like: ComponentCall,
    probed: int,
) -> Callable[..., object]:
    """A denoiser, run for the first row of each of the `kinds` `[B]`; the result has all rows.

    `of_rows(B)` is what runs it for B rows of latents. `recorded`: the same call of the rollout; `like`: that for
    `probed` samples, which shows where rows are. Where rows of a kind differ in anything, it is run as it is.
    """
    n, firsts = len(kinds), sorted(set(kinds))
    positions = [firsts.index(k) for k in kinds]

    def spread(value: torch.Tensor, dim: int, _: torch.Tensor) -> torch.Tensor:
        where = torch.as_tensor(positions, device=value.device)
        return value.unflatten(dim, (-1, len(firsts))).index_select(dim + 1, where).flatten(dim, dim + 1)

    def spread_list(value: list[object], _: list[object]) -> list[object]:
        return [value[start + i] for start in range(0, len(value), len(firsts)) for i in positions]

    def run(*args: object, **kwargs: object) -> object:
        given = (args, kwargs)
        with_graph = any(torch.is_tensor(v) and v.requires_grad for v in tree_leaves(given))
        if with_graph or not same(take(given, like.inputs, kinds, n, probed), given):
            return of_rows(n)(*args, **kwargs)
        few_args, few_kwargs = take(given, like.inputs, firsts, n, probed)
        output = of_rows(len(firsts))(*few_args, **few_kwargs)
        return map_rows(output, recorded.output, like.output, n, probed, spread, spread_list)

    return run
