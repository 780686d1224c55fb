"""Tensors that a worker keeps as copies, and such as travel between driver and workers as one."""

from collections.abc import Callable, Mapping

import numpy as np
import torch


@torch.no_grad()
def copied(tensors: Mapping[str, torch.Tensor], into: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies of `tensors` in main memory, in the place of those copies `into` that are alike: it need not be found."""
    found = {}
    for name, tensor in tensors.items():
        place = into.get(name)
        alike = place is not None and (place.shape, place.dtype) == (tensor.shape, tensor.dtype)
        found[name] = place.copy_(tensor) if place is not None and alike else tensor.detach().to("cpu", copy=True)
    return found


class Rows(dict[int, torch.Tensor]):
    """Tensors `[B, T]` of one dtype by number, which travel between processes as one.

    Each alone would take with it all that it is a view of, and some kilobytes more.
    """

    def __reduce__(self) -> tuple[Callable[..., "Rows"], tuple[object, ...]]:
        if not self:
            return Rows, ()
        whole = torch.cat([tensor.detach() for tensor in self.values()])
        return _rows, (list(self), [len(tensor) for tensor in self.values()], whole.numpy())


def _rows(numbers: list[int], lengths: list[int], whole: np.ndarray) -> Rows:
    return Rows(zip(numbers, torch.from_numpy(whole.copy()).split(lengths), strict=True))  # Ray's are not to be written
