"""The gradient of a replay by trained steps."""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class StepGradients(Generic[T]):
    """Finds what each trained step of one replay adds to the gradients of `parameters`, as `reduce` tells it.

    A replay goes back through the denoiser of a step before that of the next one runs. So what a step adds is the
    difference between the gradients where the next one begins, or the replay has ended, and those where it began. They
    are only read: training goes on as if nobody had looked.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], reduce: Callable[[Sequence[torch.Tensor]], T]) -> None:
        self.parameters, self.reduce = parameters, reduce
        self._found: dict[int, T] = {}
        self._step: int | None = None
        self._before: list[torch.Tensor | None] = []

    def begin(self, step: int) -> None:
        """To be called where the loss of `step` is computed."""
        self._close()
        self._step = step
        self._before = [None if p.grad is None else p.grad.clone() for p in self.parameters]

    def end(self) -> dict[int, T]:
        """Return the parts by step; to be called when the replay has ended."""
        self._close()
        return self._found

    def _close(self) -> None:
        if self._step is None:
            return
        added = []
        for p, before in zip(self.parameters, self._before, strict=True):
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            added.append(grad if before is None else grad - before)
        self._found[self._step] = self.reduce(added)
        self._step, self._before = None, []


def squared_norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of the squares of all values, a scalar on their device, which nothing waits for."""
    return torch.nn.utils.get_total_norm(gradients).square()


def flat_copy(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """All values as one fp32 vector on the CPU."""
    from gerl.model.shards import local  # in here: the driver of a run does without torch.distributed.tensor

    return torch.cat([local(gradient).detach().float().cpu().flatten() for gradient in gradients])
