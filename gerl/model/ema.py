"""Exponential moving averages of the trained weights: what validation draws with, and the old policies."""

import contextlib
from collections.abc import Callable, Iterator, Mapping

import torch

from gerl.model.shards import local


class EMA:
    """`e <- d e + (1 - d) p`, where `n`, the number of updates so far, gives `d`.

    `decay`: a number, warmed up as `d = min((1 + n) / (10 + n), decay)`, or the function `n -> d` itself. With 0 the
    average is the weights themselves.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], decay: float | Callable[[int], float]) -> None:
        self.parameters = parameters
        self.decay = decay
        self.updates = 0
        # clones: `detach().cpu()` would alias the weights on a CPU, and a swap would destroy them
        self.average = {name: p.detach().clone() for name, p in parameters.items()}

    @property
    def next_decay(self) -> float:
        """The decay of the next update."""
        if callable(self.decay):
            return self.decay(self.updates)
        return min((1 + self.updates) / (10 + self.updates), self.decay)

    @torch.no_grad()
    def update(self) -> None:
        """Take the current weights into the average."""
        d = self.next_decay
        for name, p in self.parameters.items():
            local(self.average[name]).lerp_(local(p), 1 - d)
        self.updates += 1

    @contextlib.contextmanager
    def swapped_in(self, average: Mapping[str, torch.Tensor] | None = None) -> Iterator[None]:
        """The model computes with the averaged weights; the trained ones come back unchanged.

        `average`: a copy of them from an earlier moment, to be taken in their place.
        """
        kept = {name: p.detach().clone() for name, p in self.parameters.items()}
        self._copy(self.average if average is None else average)
        try:
            yield
        finally:
            self._copy(kept)

    def load(self, average: Mapping[str, torch.Tensor], updates: int) -> None:
        """Restore a saved average; names must be the same."""
        for name, value in self.average.items():
            value.copy_(average[name])
        self.updates = updates

    @torch.no_grad()
    def _copy(self, values: Mapping[str, torch.Tensor]) -> None:
        for name, p in self.parameters.items():
            local(p).copy_(local(values[name]))
