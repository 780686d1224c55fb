"""The clean latents of images that were not drawn: the way from a pipeline's last step to its VAE, backwards.

Between its last scheduler step and `vae.decode(z)` a pipeline unpacks, scales and shifts its latents, value by value.
So z = a x0 + b, each value by itself in whatever order, and both a and b are found by running the pipeline's own code
from given latents to where it decodes, with its derivative. Where it does something else, z does not come out again.
"""

from __future__ import annotations  # of diffusers, which the driver of a run does without

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from gerl.engine.batching import batch_size, detached_copy, materialised, select_call
from gerl.engine.instrument import StopPipeline, Timestep, _put, routed
from gerl.engine.record import Recorder
from gerl.engine.tape import Tape
from gerl.engine.transitions import Sampler, advance
from gerl.errors import ModelError

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline, SchedulerMixin

ENDLESS = 10**9
NEAR = {torch.float32: 1e-4, torch.float64: 1e-4}  # of its norm, how far z may be from the encoded image
NEAR_IN_HALF = 2e-2
NOT_DECODED = "existing images are not supported with this pipeline: it does not decode its latents with vae.decode"


def record_loop(pipe: DiffusionPipeline, call: Mapping[str, object]) -> Tape:
    """The tape of the denoising loop of `pipe(**call)` for replays at given latents, as `record_structure` makes it.

    The denoiser runs where a step calls it otherwise than the step before, mostly once, and nothing is decoded. Raises
    `ModelError` where the pipeline does not decode with `vae`.
    """
    n = batch_size(call)
    arguments = {name: value for name, value in call.items() if name != "generator"}
    tape = Tape(select_call(arguments, range(n)), n)
    recorder = _Loop(tape, Sampler("ode", 0.0), (), None)
    recorder.structure = ENDLESS
    given = [torch.Generator().manual_seed(0) for _ in range(n)]  # leaves the global generator as it is
    with _decoding(pipe, lambda z: None):
        recorder.run(pipe, select_call(arguments, range(n)), given)
    return tape


class Inverse:
    """The map from what the VAE of `pipe` decodes to clean latents, for the shape of a recorded loop."""

    def __init__(self, pipe: DiffusionPipeline, tape: Tape) -> None:
        """`tape`: of one sample, see `record_loop`. Raises `ModelError` if latents do not reach the VAE one by one."""
        self.pipe, self.tape, self.checked = pipe, tape, False
        like = tape.steps[-1].x_next
        self.zero = torch.zeros_like(like).requires_grad_()
        z = _decoded(pipe, tape, self.zero)
        if z is None or not z.requires_grad:
            raise ModelError(unknown(pipe))
        self.z, self.offset = z, z.detach().float()
        ones = _decoded(pipe, tape, torch.ones_like(like))
        assert ones is not None
        self.scale = self._back(ones.detach().float() - self.offset)
        if not bool((self.scale > 0).all()):
            raise ModelError(unknown(pipe))

    @property
    def shape(self) -> tuple[int, ...]:
        """That of what the VAE decodes."""
        return tuple(self.z.shape)

    def of(self, z: torch.Tensor) -> torch.Tensor:
        """The clean latents `[1, ...]` fp32 that are decoded as `z`.

        Raises `ModelError` if there are none, which is looked at the first time.
        """
        if tuple(z.shape) != self.shape:
            raise ModelError(
                f"the VAE of {type(self.pipe).__name__} encodes an image to latents {list(z.shape)}, and decodes "
                f"{list(self.shape)} with these settings of `sampling`: existing images are supported only if both "
                "are equal (for video pipelines sampling.call.num_frames=1)"
            )
        x0 = self._back(z.float() - self.offset) / self.scale
        if self.checked:
            return x0
        again = _decoded(self.pipe, self.tape, x0)
        assert again is not None
        error = torch.linalg.vector_norm(again.detach().float() - z.float()) / torch.linalg.vector_norm(z.float())
        if not float(error) <= NEAR.get(again.dtype, NEAR_IN_HALF):
            raise ModelError(unknown(self.pipe))
        self.checked = True
        return x0

    def _back(self, z: torch.Tensor) -> torch.Tensor:
        (x,) = torch.autograd.grad(self.z, self.zero, z.to(self.z.dtype), retain_graph=True)
        return x.detach().float()


def unknown(pipe: DiffusionPipeline) -> str:
    """Why images cannot be encoded for `pipe`."""
    return (
        f"existing images are not supported with {type(pipe).__name__}: it does not pass its latents to its VAE "
        "value by value, so the latents of an image are unknown"
    )


class _Loop(Recorder):
    def _finish(self) -> None:
        raise ModelError(NOT_DECODED)


class _Tail:
    """The head of a pass that ends with given latents and lets nothing be computed before: see `instrument.Head`."""

    def __init__(self, tape: Tape, given: torch.Tensor) -> None:
        self.tape, self.given = tape, given
        self.looped = tape.looped_components()
        self.calls = iter([c for c in tape.component_calls if c.component in self.looped])
        self.answered = self.taken = 0

    def on_method(self, name: str, method: Callable[..., object], *args: object, **kwargs: object) -> object:
        answers = self.tape.answers
        if self.answered < len(answers) and answers[self.answered].method == name:
            self.answered += 1
            return materialised(detached_copy(answers[self.answered - 1].value), self.given.device)
        return method(*args, **kwargs)

    def on_component(self, name: str, forward: Callable[..., object], *args: object, **kwargs: object) -> object:
        recorded = next(self.calls, None) if name in self.looped else None
        if recorded is None:
            with torch.no_grad():
                return forward(*args, **kwargs)
        return materialised(detached_copy(recorded.output), self.given.device)

    def on_scheduler_step(
        self, scheduler: SchedulerMixin, model_output: torch.Tensor, timestep: Timestep, sample: torch.Tensor
    ) -> torch.Tensor:
        del model_output, sample
        advance(scheduler, timestep)
        self.taken += 1
        return self.given if self.taken == len(self.tape.steps) else self.tape.steps[self.taken - 1].x_next

    def on_companion_step(
        self, scheduler: SchedulerMixin, model_output: torch.Tensor, timestep: Timestep, sample: torch.Tensor
    ) -> torch.Tensor:
        del model_output
        advance(scheduler, timestep)
        return sample


def _decoded(pipe: DiffusionPipeline, tape: Tape, latents: torch.Tensor) -> torch.Tensor | None:
    """The input of `vae.decode` if the last step ended at `latents`, with gradient; None where it is not reached."""
    found: list[torch.Tensor] = []
    undecorated = inspect.unwrap(type(pipe).__call__)
    call = select_call(tape.call, range(tape.batch_size))
    stopped = contextlib.suppress(StopPipeline)
    with torch.enable_grad(), _decoding(pipe, found.append), routed(pipe, _Tail(tape, latents)), stopped:
        undecorated(pipe, **call)
    return found[0] if found and torch.is_tensor(found[0]) else None


@contextlib.contextmanager
def _decoding(pipe: DiffusionPipeline, take: Callable[[torch.Tensor], object]) -> Iterator[None]:
    """Leave the pipeline where its VAE is asked to decode, and give that to `take`."""
    vae = getattr(pipe, "vae", None)
    if not isinstance(vae, torch.nn.Module) or not hasattr(vae, "decode"):
        raise ModelError(f"existing images are not supported with {type(pipe).__name__}: it has no VAE")

    def stop(z: torch.Tensor, *_: object, **__: object) -> object:
        take(z)
        raise StopPipeline

    undo: list[Callable[[], object]] = []
    try:
        _put(undo, vae, "decode", stop)
        yield
    finally:
        for restore in undo:
            restore()
