"""Rows of samples in nested values: taken without knowledge of what the values mean.

The batch dimension of a value is found by comparing it with the same value of a call for one sample (the *probe*). A
single shape is not enough: `[8, 77, 32]` may be 8 prompts, 4 with their negatives, or 8 layers of one.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_leaves, tree_map

from gerl.protocol import References

Tree = object  # tensors and other values, in nested lists, tuples and dictionaries
Arguments = tuple[tuple[object, ...], dict[str, object]]  # positional and keyword arguments
Nested = TypeVar("Nested")


def _copy(tree: Nested) -> Nested:
    copied: Nested = tree_map(lambda v: v.clone() if torch.is_tensor(v) else v, tree)
    return copied


def detached_copy(tree: Nested) -> Nested:
    """Return `tree` with every tensor detached and cloned, so that later writes do not change the recording."""
    copied: Nested = tree_map(lambda v: v.detach().clone() if torch.is_tensor(v) else v, tree)
    return copied


def shapes(tree: Nested) -> Nested:
    """Return `tree` with its tensors on the `meta` device: shapes without values."""
    emptied: Nested = tree_map(lambda v: v.detach().to("meta") if torch.is_tensor(v) else v, tree)
    return emptied


def num_elements(tree: Tree) -> int:
    """Return the number of tensor elements in `tree`."""
    return sum(v.numel() for v in tree_leaves(tree) if torch.is_tensor(v))


def tensor_bytes(values: Iterable[Tree]) -> int:
    """Return the bytes of the tensors in `values`; shared storage counts once, tensors without values do not count."""
    tensors = (v for v in tree_leaves(list(values)) if torch.is_tensor(v) and not v.is_meta)
    storages = (v.untyped_storage() for v in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def materialised(tree: Nested, device: torch.device | None) -> Nested:
    """Return `tree` with zeros on `device` for tensors that were kept as shapes only."""
    filled: Nested = tree_map(
        lambda v: torch.zeros_like(v, device=device) if torch.is_tensor(v) and v.is_meta else v, tree
    )
    return filled


def rows(tensor: torch.Tensor, index: Sequence[int], n: int) -> torch.Tensor:
    """Select the samples `index` of a `[n, ...]` or `[n * r, ...]` tensor with consecutive rows of each sample."""
    return tensor.unflatten(0, (n, -1))[list(index)].flatten(0, 1)


def batch_size(call: Mapping[str, object]) -> int:
    """Return the number of samples of a pipeline call: the length of its prompt list, or of its prompt embeddings.

    A prompt that is a string, for pipelines that take no list, is one sample.
    """
    for name in ("prompt", "prompt_embeds"):
        value = call.get(name)
        if isinstance(value, list | torch.Tensor):
            return len(value)
    return 1


def select_call(call: Mapping[str, object], index: Sequence[int]) -> dict[str, object]:
    """Return the keyword arguments of a call for some samples: per-sample lists and tensors are indexed.

    A list of numbers as long as the batch (`sigmas`, say) is a schedule, and `References` are those of every sample.
    Lists of values per sample are copied.
    """
    n = batch_size(call)

    def pick(value: object) -> object:
        if isinstance(value, References):
            return value
        if isinstance(value, list) and len(value) == n and not isinstance(value[0], int | float):
            return [value[i] for i in index]
        if torch.is_tensor(value) and value.ndim and len(value) == n:
            return value[list(index)]
        return value

    return {name: pick(value) for name, value in call.items()}


def take(full: Any, probe_value: Any, index: Sequence[int], n: int, probed: int = 1, graph: bool = False) -> Any:
    """Select the samples `index` of `full`, a value for `n` samples; `probe_value` is the same for `probed` samples.

    Handles `[m * n, ...]` (negative and positive prompts, say), the batch in a later dimension, lists with an entry per
    sample, and nested dictionaries and tuples. If `probe_value` has another structure (a mask that is None without
    padding), the first dimension of size `n` is used. A value without batch dimension is copied completely, and so is
    everything if `n` equals `probed` (1, or 2 if `n` is 1). `graph`: keep the gradient.
    """
    copied = _copy if graph else detached_copy

    def rows_of(value: torch.Tensor, dim: int, _: torch.Tensor) -> torch.Tensor:
        where = torch.as_tensor(list(index), device=value.device)
        value = value if graph else value.detach()
        return value.unflatten(dim, (-1, n)).index_select(dim + 1, where).flatten(dim, dim + 1)

    def entries_of(value: list[Any], _: list[Any]) -> list[Any]:
        return type(value)(copied(value[start + i]) for start in range(0, len(value), n) for i in index)

    return copied(full) if n == probed else map_rows(full, full, probe_value, n, probed, rows_of, entries_of, copied)


def entries(full: list[Any] | tuple[Any, ...], like: object, n: int, probed: int) -> int:
    """Return how many entries of `full` each of `n` samples has, 0 if entries are not samples; `like`: see `take`."""
    is_list = isinstance(like, list | tuple)
    multiple = len(like) / probed if is_list else int(isinstance(full, list) and len(full) == n)  # type: ignore[arg-type]
    return int(multiple) if multiple and len(full) == multiple * n else 0


def batch_dim(full: torch.Tensor, like: object, n: int, probed: int) -> int | None:
    """Return the first dimension of `full` that grows with the number of samples `n`; `like`: see `take`."""
    multiples: list[float] = [int(size == n) for size in full.shape]
    if isinstance(like, torch.Tensor) and like.ndim == full.ndim:
        multiples = [size / probed for size in like.shape]
    dimensions = (dim for dim, multiple in enumerate(multiples) if multiple and full.shape[dim] == multiple * n)
    return next(dimensions, None)


def map_rows(
    value: Any,
    recorded: Any,
    like: Any,
    n: int,
    probed: int,
    tensor: Callable[[torch.Tensor, int, torch.Tensor], torch.Tensor],
    listed: Callable[[list[Any], list[Any]], list[Any]],
    rest: Callable[[Any], Any] = lambda value: value,
) -> Any:
    """Map `value`, with the structure of the `recorded` value of `n` samples, to other rows; gradients flow.

    `tensor(value, dim, recorded)` maps a tensor with rows in `dim`, `listed(value, recorded)` a list or tuple with
    entries per sample, and `rest` values without rows; `like` and `probed`: see `take`.
    """
    if isinstance(value, torch.Tensor):
        dim = batch_dim(recorded, like, n, probed)
        return rest(value) if dim is None else tensor(value, dim, recorded)
    if isinstance(value, list | tuple) and entries(recorded, like, n, probed):
        return listed(value, recorded)  # type: ignore[arg-type]
    if not isinstance(value, list | tuple | dict):
        return rest(value)
    values = value.values() if isinstance(value, dict) else value
    matched = zip(values, pairs(recorded, like), strict=True)
    parts = [map_rows(v, *pair, n, probed, tensor, listed, rest) for v, pair in matched]
    if isinstance(value, dict):
        named = dict(zip(value, parts, strict=True))
        return named if type(value) is dict else type(value)(**named)
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)


def pairs(value: Any, like: Any) -> list[tuple[Any, Any]]:
    """Pair the parts of a list, tuple or dictionary with those of `like`, or with None if the structures differ."""
    if isinstance(value, dict):
        named = like if isinstance(like, dict) else {}
        return [(part, named.get(name)) for name, part in value.items()]
    alike = isinstance(like, list | tuple) and len(like) == len(value)
    return list(zip(value, like if alike else [None] * len(value), strict=True))


def same(ours: Tree, theirs: Tree) -> bool:
    """Whether two structures have equal tensors at the same positions."""
    a, b = tree_leaves(ours), tree_leaves(theirs)
    pairs = list(zip(a, b, strict=False))
    if len(a) != len(b) or any(torch.is_tensor(x) != torch.is_tensor(y) for x, y in pairs):
        return False
    tensors = [(x, y) for x, y in pairs if torch.is_tensor(x) and torch.is_tensor(y) and x is not y]
    if any((x.shape, x.dtype, x.device) != (y.shape, y.dtype, y.device) for x, y in tensors):
        return False
    flags: dict[torch.device, list[torch.Tensor]] = {}
    for x, y in tensors:
        flags.setdefault(x.device, []).append((x != y).any())
    return not any(bool(torch.stack(of_device).any()) for of_device in flags.values())  # one wait per device


def leading(output: Tree) -> torch.Tensor | list[object]:
    """Return the first tensor or list of an output, which has its rows; an empty list if there is none."""
    values = tree_leaves(output, is_leaf=lambda value: isinstance(value, list))
    return next((v for v in values if isinstance(v, list) or (torch.is_tensor(v) and v.ndim)), [])
