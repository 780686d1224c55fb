"""Sub-batches of whatever a pipeline computes, without knowing what it means.

The batch dimension of a value is found by comparing it with the same value of a call for one sample (the *probe*). It
cannot be read off one shape alone: `[8, 77, 32]` may be 8 prompts, 4 with their negatives, or 8 layers of one.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_leaves, tree_map

from gerl.errors import ReplayError

Tree = object  # tensors and other values, in nested lists, tuples and dictionaries
Arguments = tuple[tuple[object, ...], dict[str, object]]  # positional and named
Nested = TypeVar("Nested")


def detached_copy(tree: Nested) -> Nested:
    """`tree` with every tensor detached and cloned, so that nobody can write into what is recorded."""
    copied: Nested = tree_map(lambda v: v.detach().clone() if torch.is_tensor(v) else v, tree)
    return copied


def unwritten(values: torch.Tensor, written: torch.Tensor | None) -> torch.Tensor:
    """Each row of `values` `[B, ...]` without its elements `written` (bool, same shape): `[B, N]`; as is for None.

    A row of which more is written is filled up with its own elements from the first one on: in half precision a value
    that was written over may by chance be what it was. Raises `ReplayError` if that leaves nothing of a row.
    """
    if written is None:
        return values
    left = (~written).flatten(1)
    counts = left.sum(1, keepdim=True)
    if not bool(counts.all()):
        raise ReplayError("the pipeline's condition leaves nothing of a sample to learn: use a mask with an opening")
    most = int(counts.max())
    order = left.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    places = order.gather(1, torch.arange(most, device=left.device) % counts)
    return values.flatten(1).gather(1, places)


def shapes(tree: Nested) -> Nested:
    """`tree` with its tensors on the device `meta`: shapes without values."""
    emptied: Nested = tree_map(lambda v: v.detach().to("meta") if torch.is_tensor(v) else v, tree)
    return emptied


def num_elements(tree: Tree) -> int:
    """Number of tensor elements in `tree`."""
    return sum(v.numel() for v in tree_leaves(tree) if torch.is_tensor(v))


def tensor_bytes(values: Iterable[Tree]) -> int:
    """Bytes of the tensors in `values`; storage that they share counts once, shapes without values count nothing."""
    tensors = (v for v in tree_leaves(list(values)) if torch.is_tensor(v) and not v.is_meta)
    storages = (v.untyped_storage() for v in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def materialised(tree: Nested, device: torch.device | None) -> Nested:
    """`tree` with zeros on `device` in place of the tensors of which only the shape was kept."""
    filled: Nested = tree_map(
        lambda v: torch.zeros_like(v, device=device) if torch.is_tensor(v) and v.is_meta else v, tree
    )
    return filled


def rows(tensor: torch.Tensor, index: Sequence[int], n: int) -> torch.Tensor:
    """The samples `index` of a `[n, ...]` or `[r * n, ...]` tensor, in which the rows of a sample are together."""
    return tensor.unflatten(0, (n, -1))[list(index)].flatten(0, 1)


def batch_size(call: Mapping[str, object]) -> int:
    """Number of samples of a pipeline call: the length of its prompt list, or of its prompt embeddings.

    A prompt that is a string, for pipelines that take no list, is one sample.
    """
    for name in ("prompt", "prompt_embeds"):
        value = call.get(name)
        if isinstance(value, list | torch.Tensor):
            return len(value)
    return 1


def select_call(call: Mapping[str, object], index: Sequence[int]) -> dict[str, object]:
    """The keyword arguments of a call for some of its samples: per-sample lists and tensors are indexed, lists copied.

    A list of numbers as long as the batch (`sigmas`, say) is a schedule, not a value per sample.
    """
    n = batch_size(call)

    def pick(value: object) -> object:
        if isinstance(value, list) and len(value) == n and not isinstance(value[0], int | float):
            return [value[i] for i in index]
        if torch.is_tensor(value) and value.ndim and len(value) == n:
            return value[list(index)]
        return value

    return {name: pick(value) for name, value in call.items()}


def take(full: Any, probe_value: Any, index: Sequence[int], n: int, probed: int = 1, graph: bool = False) -> Any:
    """The samples `index` of `full`, computed for `n` samples; `probe_value` is the same computed for `probed` samples.

    Handles `[m * n, ...]` (negative and positive prompts, say), the batch in a later dimension, lists with an entry per
    sample, and nested dictionaries and tuples. Where `probe_value` has another structure (a mask that is None without
    padding), the first dimension of size `n` is taken. A value without batch dimension is returned whole, as a copy,
    and so is everything where `n` is `probed`. `probed` is 1, or 2 where `n` is 1. `graph`: gradients flow.
    """
    copied = _copy if graph else detached_copy
    if n == probed or not isinstance(full, torch.Tensor | list | tuple | dict):
        return copied(full)
    if isinstance(full, torch.Tensor):
        return _take_tensor(full if graph else full.detach(), probe_value, index, n, probed)
    if isinstance(full, dict):
        named = probe_value if isinstance(probe_value, dict) else {}
        picked = {name: take(value, named.get(name), index, n, probed, graph) for name, value in full.items()}
        return picked if type(full) is dict else type(full)(**picked)
    like = probe_value if isinstance(probe_value, list | tuple) else None
    if multiple := entries(full, like, n, probed):
        return type(full)(copied(full[j * n + i]) for j in range(multiple) for i in index)
    parts = like if like is not None and len(like) == len(full) else [None] * len(full)
    taken = [take(value, part, index, n, probed, graph) for value, part in zip(full, parts, strict=True)]
    return type(full)(*taken) if hasattr(full, "_fields") else type(full)(taken)


def entries(full: list[Any] | tuple[Any, ...], like: object, n: int, probed: int) -> int:
    """How many entries of `full` each of `n` samples has, 0 where they are no samples'; `like`: see `take`."""
    known = isinstance(like, list | tuple)
    multiple = len(like) / probed if known else int(isinstance(full, list) and len(full) == n)  # type: ignore[arg-type]
    return int(multiple) if multiple and len(full) == multiple * n else 0


def batch_dim(full: torch.Tensor, like: object, n: int, probed: int) -> int | None:
    """The first dimension of `full` that grows with the number of samples `n`; `like`: see `take`."""
    multiples: list[float] = [int(size == n) for size in full.shape]
    if isinstance(like, torch.Tensor) and like.ndim == full.ndim:
        multiples = [size / probed for size in like.shape]
    found = (dim for dim, multiple in enumerate(multiples) if multiple and full.shape[dim] == multiple * n)
    return next(found, None)


def map_rows(
    value: Any,
    recorded: Any,
    like: Any,
    n: int,
    probed: int,
    tensor: Callable[[torch.Tensor, int, torch.Tensor], torch.Tensor],
    listed: Callable[[list[Any], list[Any]], list[Any]],
) -> Any:
    """An output with other rows than the `recorded` one of `n` samples; gradients flow.

    `tensor(value, dim, recorded)` makes it of a tensor whose rows lie in `dim`, `listed(value, recorded)` of a list
    with entries per sample; `like` and `probed`: see `take`. What has no rows is left as it is.
    """
    if isinstance(value, torch.Tensor):
        dim = batch_dim(recorded, like, n, probed)
        return value if dim is None else tensor(value, dim, recorded)
    if isinstance(value, list) and entries(recorded, like, n, probed):
        return listed(value, recorded)
    if not isinstance(value, list | tuple | dict):
        return value
    values = value.values() if isinstance(value, dict) else value
    matched = zip(values, pairs(recorded, like), strict=True)
    parts = [map_rows(v, *pair, n, probed, tensor, listed) for v, pair in matched]
    if isinstance(value, dict):
        named = dict(zip(value, parts, strict=True))
        return named if type(value) is dict else type(value)(**named)
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)


def pairs(value: Any, like: Any) -> list[tuple[Any, Any]]:
    """The parts of a list, tuple or dictionary with those of `like`, None where it has another structure."""
    if isinstance(value, dict):
        named = like if isinstance(like, dict) else {}
        return [(part, named.get(name)) for name, part in value.items()]
    alike = isinstance(like, list | tuple) and len(like) == len(value)
    return list(zip(value, like if alike else [None] * len(value), strict=True))


def same(ours: Tree, theirs: Tree) -> bool:
    """Whether two structures have equal tensors, and other values in the same places."""
    a, b = tree_leaves(ours), tree_leaves(theirs)
    return len(a) == len(b) and all(
        torch.equal(x, y) if torch.is_tensor(x) and torch.is_tensor(y) else torch.is_tensor(x) == torch.is_tensor(y)
        for x, y in zip(a, b, strict=True)
    )


def _copy(tree: Nested) -> Nested:
    copied: Nested = tree_map(lambda v: v.clone() if torch.is_tensor(v) else v, tree)
    return copied


def _take_tensor(full: torch.Tensor, probe_value: object, index: Sequence[int], n: int, probed: int) -> torch.Tensor:
    dim = batch_dim(full, probe_value, n, probed)
    if dim is None:
        return full.clone()
    where = torch.as_tensor(list(index), device=full.device)
    return full.unflatten(dim, (-1, n)).index_select(dim + 1, where).flatten(dim, dim + 1)
