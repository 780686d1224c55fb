"""The state after the last finished step, kept while the next one changes it."""

from __future__ import annotations  # of diffusers, which the driver of a run does without

import contextlib
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from gerl.run.state import WorkerState
from gerl.workers.values import copied

if TYPE_CHECKING:
    from gerl.workers.actor import Actor

Kept = tuple[dict[str, torch.Tensor], WorkerState]  # copies in main memory, not yet as files


class Keeping:
    """Keeps a copy of an actor's state, made beside the drawing of the next step, which changes nothing of it."""

    def __init__(self, actor: Actor) -> None:
        self.actor = actor
        self.step: int | None = None  # the finished step of the copy
        self._copy: Future[Kept] | None = None
        self._executor = ThreadPoolExecutor(1, "keeping")

    def begin(self, step: int) -> None:
        """Begin to copy the state after `step`; until `kept` returns, no weights may be trained or loaded."""
        if self.step == step:
            return
        into = {} if self._copy is None else self._copy.result()[0]
        self._copy = self.step = None
        tensors, numbers = self.actor.state()
        # at once: to draw with other weights puts them in the place of the trained ones for a while
        trained = {name: t for name, t in tensors.items() if name.startswith(f"{self.actor.kind}/")}
        first, device = copied(trained, into), next(iter(trained.values())).device
        beside: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if device.type == "cuda":
            stream = torch.cuda.Stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            beside = torch.cuda.stream(stream)

        def rest() -> Kept:
            with beside:
                both = first | copied({name: t for name, t in tensors.items() if name not in first}, into)
            return {name: both[name] for name in tensors}, numbers

        self._copy, self.step = self._executor.submit(rest), step

    def kept(self, step: int) -> Kept:
        """The state after `step`, the last that was finished: copied now if that was not begun."""
        self.begin(step)
        assert self._copy is not None
        return self._copy.result()
