"""Bytes and arithmetic of operations, as torch dispatches them: on weights that exist as shapes, or on real ones."""

import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

aten = torch.ops.aten
INDEXING = (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_)


def _attention(query: torch.Size, key: torch.Size, value: torch.Size, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


def _attention_backward(
    grad: torch.Size, query: torch.Size, key: torch.Size, value: torch.Size, *_: Any, **__: Any
) -> int:
    return int(sdpa_backward_flop_count(grad, query, key, value))


# torch's counter leaves the CPU's attention out; to be given to its FlopCounterMode as `custom_mapping`
CPU_ATTENTION: dict[Any, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


def _shape(value: object) -> object:
    return value.shape if isinstance(value, torch.Tensor) else value


def _spread(indices: torch.Tensor, shape: torch.Size, dim: int = -1, **_: Any) -> torch.Tensor:
    """Positions along `dim` of a tensor of `shape`, in the shape of `indices`, all of them equally often."""
    with _disable_current_modes():
        moved = torch.empty(indices.shape, device="meta").movedim(dim, -1).shape
        return (torch.arange(math.prod(moved)) % shape[dim]).view(moved).movedim(-1, dim)


class Ledger(TorchDispatchMode):
    """Follows the storages that operations make while it is entered, and counts floating-point operations.

    A storage counts from the operation that makes it until the last tensor on it is gone, wherever that is held, by
    autograd as well. `live`: bytes of those that are there; `peak`: the most of them at a time since `reset`; `flops`:
    operations since, a multiplication and an addition as two, by the formulas of torch's `FlopCounterMode`.

    Entered inside a `FakeTensorMode`, what depends on no shape without values (masks, positions) is computed, so that
    models can read it. The positions that `topk` finds are spread evenly, as routers of experts are trained to spread
    them: how many there are, and with them the number of operations, does not depend on values.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self.flops = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # by id, which is not reused while it is here

    def reset(self) -> None:
        """Begin a new peak, and count operations from 0; what is alive stays so."""
        self.peak, self.flops = self.live, 0

    def leave_out(self, tensors: object) -> None:
        """The storages of `tensors`, such as weights, are not counted."""
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, torch.Tensor):
                self._follow(tensor, counted=False)

    def count(self, tensors: object) -> None:
        """The storages of `tensors` count from now on, as long as they live."""
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, torch.Tensor):
                self._follow(tensor, counted=True)
        self.peak = max(self.peak, self.live)

    def _follow(self, tensor: torch.Tensor, counted: bool) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._known:
            return
        size = storage.nbytes() if counted else 0

        def freed(_: object) -> None:
            self._known.pop(key, None)
            self.live -= size

        self._known[key] = weakref.ref(storage, freed)
        self.live += size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs, packet = kwargs or {}, func._overloadpacket
        if self._has_values(func, args, kwargs):
            with _disable_current_modes():
                result = func(*args, **kwargs)
        else:
            if packet in INDEXING:
                args = (args[0], self._as_positions(args[1]), *args[2:])
            result = func(*args, **kwargs)
            if packet is aten.topk:
                result = (result[0], _spread(result[1], args[0].shape, *args[2:3], **kwargs))
        self.count(result)
        if packet in CPU_ATTENTION:
            self.flops += CPU_ATTENTION[packet](*map(_shape, args), **{k: _shape(v) for k, v in kwargs.items()})
        elif packet in flop_registry:
            self.flops += int(flop_registry[packet](*args, **kwargs, out_val=result))
        return result

    def _as_positions(self, indices: Any) -> list[Any]:
        """`indices` of a shape, with masks that have values as the positions at which they are true."""
        found: list[Any] = []
        for index in indices:
            if isinstance(index, torch.Tensor) and index.dtype == torch.bool and not isinstance(index, FakeTensor):
                with _disable_current_modes():
                    found += index.nonzero(as_tuple=True)
            else:
                found.append(index)
        self.count(found)
        return found

    @staticmethod
    def _has_values(func: Any, args: Any, kwargs: Any) -> bool:
        """Whether an operation is on real tensors alone, or makes integers of nothing."""
        tensors = [v for v in tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor)]
        if tensors:
            return not any(isinstance(v, FakeTensor) or v.is_meta for v in tensors)
        dtype = kwargs.get("dtype")
        if dtype is None:
            return func._overloadpacket is aten.arange and all(isinstance(v, int) for v in args)
        return not dtype.is_floating_point and not dtype.is_complex and kwargs.get("device") != torch.device("meta")
