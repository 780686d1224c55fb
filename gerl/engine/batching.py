"""Sub-batches of whatever a pipeline computes, without knowing what it means.

The batch dimension of a value is found by comparing it with the same value of a call for one sample (the *probe*).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from gerl.errors import ReplayError


def detached_copy(tree: Any) -> Any:
    """`tree` with every tensor detached and cloned, so that nobody can write into what is recorded."""
    return tree_map(lambda v: v.detach().clone() if torch.is_tensor(v) else v, tree)


def shapes(tree: Any) -> Any:
    """`tree` with tensors that have no values: what is compared to find batch dimensions."""
    return tree_map(lambda v: v.detach().to("meta") if torch.is_tensor(v) else v, tree)


def num_elements(tree: Any) -> int:
    """Number of tensor elements in `tree`."""
    return sum(v.numel() for v in tree_leaves(tree) if torch.is_tensor(v))


def materialised(tree: Any, device: torch.device | None) -> Any:
    """`tree` with zeros on `device` in place of the tensors of which only the shape was kept."""
    return tree_map(lambda v: torch.zeros_like(v, device=device) if torch.is_tensor(v) and v.is_meta else v, tree)


def rows(tensor: torch.Tensor, index: Sequence[int], n: int) -> torch.Tensor:
    """The samples `index` of a `[n, ...]` or `[r * n, ...]` tensor, in which the rows of a sample are together."""
    return tensor.unflatten(0, (n, -1))[list(index)].flatten(0, 1)


def batch_size(call: dict[str, Any]) -> int:
    """Number of samples of a pipeline call: the length of its prompt list, or of its prompt embeddings."""
    for name in ("prompt", "prompt_embeds"):
        value = call.get(name)
        if isinstance(value, list | torch.Tensor):
            return len(value)
    if isinstance(call.get("prompt"), str):
        raise ReplayError("the call's prompt is a single string: give one prompt per sample, as a list")
    return 1


def select_call(call: dict[str, Any], index: Sequence[int]) -> dict[str, Any]:
    """The keyword arguments of a call for some of its samples: per-sample lists and tensors are indexed, lists copied.

    A list of numbers as long as the batch (`sigmas`, say) is a schedule, not a value per sample.
    """
    n = batch_size(call)

    def pick(value: Any) -> Any:
        if isinstance(value, list) and len(value) == n and not isinstance(value[0], int | float):
            return [value[i] for i in index]
        if torch.is_tensor(value) and value.ndim and len(value) == n:
            return value[list(index)]
        return value

    return {name: pick(value) for name, value in call.items()}


def take(full: Any, one: Any, index: Sequence[int], n: int, probed: int = 1) -> Any:
    """The samples `index` of `full`, computed for `n` samples; `one` is the same value computed for `probed` samples.

    Handles `[m * n, ...]` (negative and positive prompts, say), the batch in a later dimension, lists with an entry per
    sample, and nested dictionaries and tuples. Where `one` has another structure (a mask that is None without padding),
    the first dimension of size `n` is taken. A value without batch dimension is returned whole, as a copy, and so is
    everything where `n` is `probed`. `probed` is 1, or 2 where `n` is 1.
    """
    if n == probed or not isinstance(full, torch.Tensor | list | tuple | dict):
        return detached_copy(full)
    if isinstance(full, torch.Tensor):
        return _take_tensor(full, one, index, n, probed)
    if isinstance(full, dict):
        like = one if isinstance(one, dict) else {}
        picked = {name: take(value, like.get(name), index, n, probed) for name, value in full.items()}
        return picked if type(full) is dict else type(full)(**picked)
    multiple = len(one) / probed if isinstance(one, list | tuple) else int(isinstance(full, list) and len(full) == n)
    if multiple and len(full) == multiple * n:
        return type(full)(detached_copy(full[j * n + i]) for j in range(int(multiple)) for i in index)
    parts = one if isinstance(one, list | tuple) and len(one) == len(full) else [None] * len(full)
    taken = [take(value, part, index, n, probed) for value, part in zip(full, parts, strict=True)]
    return type(full)(*taken) if hasattr(full, "_fields") else type(full)(taken)


def _take_tensor(full: torch.Tensor, one: Any, index: Sequence[int], n: int, probed: int) -> torch.Tensor:
    same_rank = isinstance(one, torch.Tensor) and one.ndim == full.ndim
    like = [size / probed for size in one.shape] if same_rank else [int(size == n) for size in full.shape]
    where = torch.as_tensor(list(index), device=full.device)
    for dim, multiple in enumerate(like):
        if multiple and full.shape[dim] == multiple * n:
            grouped = full.detach().unflatten(dim, (int(multiple), n))
            return grouped.index_select(dim + 1, where).flatten(dim, dim + 1)
    return full.detach().clone()
