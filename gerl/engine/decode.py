"""Decode: the end of a recorded call once more, from latents with a gradient to images with one.

The pipeline's own `__call__` runs again, answered from the tape. At its last step the scheduler hands out the caller's
latents and the gradient is switched on: whatever the pipeline does from there on (unpacking, scaling, its VAE, the
conversion to pixels) is in the graph.
"""

from __future__ import annotations  # of diffusers, which the driver of a run does without

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from gerl.engine.batching import detached_copy, materialised, select_call
from gerl.engine.companions import CompanionsFromTape
from gerl.engine.instrument import Timestep, routed
from gerl.engine.tape import Tape
from gerl.engine.transitions import advance
from gerl.errors import ReplayError

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline, SchedulerMixin


def decoded(pipe: DiffusionPipeline, tape: Tape, latents: torch.Tensor) -> torch.Tensor:
    """Images `[B, 3, H, W]` or videos `[B, F, 3, H, W]` of finished `latents`, fp32 in [0, 1], with graph.

    `latents`: those after the last step of `tape`, `[B, ...]` fp32, with or without gradient. From the first call on
    the VAE recomputes its activations in a backward pass, if it can. Raises `ReplayError` where the pipeline does not
    do what it did in the rollout, or decodes without gradient. Decode and differentiate within torch's
    `allow_mutation_on_saved_tensors`: a pipeline may write into what its derivative needs (Kandinsky 5).
    """
    decoder = Decoder(tape, latents)
    call = select_call(tape.call, range(tape.batch_size)) | {"output_type": "pt"}
    undecorated = inspect.unwrap(type(pipe).__call__)
    _recompute(pipe)
    # the decoder switches the gradient on at the last step, and leaving no_grad puts back what was before
    with torch.no_grad(), routed(pipe, decoder):
        try:
            output = undecorated(pipe, **call)
        except RuntimeError as error:
            if "requires grad" not in str(error):  # of torch, where a pipeline goes on in numpy
                raise
            raise ReplayError(f"{_undifferentiable(pipe)} ({error})") from error
    if decoder.step != len(tape.steps):
        raise ReplayError(f"the pipeline took {decoder.step} steps when decoding, {len(tape.steps)} in the rollout")
    images = _pixels(output)
    if latents.requires_grad and not images.requires_grad:
        raise ReplayError(_undifferentiable(pipe))
    return images


def _undifferentiable(pipe: DiffusionPipeline) -> str:
    return (
        f"{type(pipe).__name__} decodes its latents without gradient: rewards cannot be differentiated, use an "
        "algorithm that needs only their values"
    )


class Decoder(CompanionsFromTape):
    """The head of a decoding: see `instrument.Head`."""

    hands_out_clean = True  # what it hands out at the last step is what is decoded, whatever the scheduler calls it

    def __init__(self, tape: Tape, latents: torch.Tensor) -> None:
        self.tape, self.latents = tape, latents
        self.looped = tape.looped_components()
        self.calls = iter([c for c in tape.component_calls if c.component in self.looped])
        self.step = 0
        self.answered = 0

    def on_method(self, name: str, method: Callable[..., object], *args: object, **kwargs: object) -> object:
        del method, args, kwargs
        if self.answered == len(self.tape.answers) or self.tape.answers[self.answered].method != name:
            raise ReplayError(f"when decoding, the pipeline calls {name}, which the rollout did not call at this point")
        self.answered += 1
        # a value that was not kept can be read before the latents are replaced only
        return materialised(detached_copy(self.tape.answers[self.answered - 1].value), self.latents.device)

    def on_component(self, name: str, forward: Callable[..., object], *args: object, **kwargs: object) -> object:
        recorded = next(self.calls, None) if name in self.looped else None
        if recorded is None:
            return forward(*args, **kwargs)
        return materialised(detached_copy(recorded.output), self.latents.device)

    def on_scheduler_step(
        self, scheduler: SchedulerMixin, model_output: torch.Tensor, timestep: Timestep, sample: torch.Tensor
    ) -> torch.Tensor:
        del model_output, sample
        if self.step == len(self.tape.steps):
            raise ReplayError(f"when decoding, the pipeline takes more than the {self.step} steps of the rollout")
        advance(scheduler, timestep)
        recorded = self.tape.steps[self.step]
        self.step += 1
        if self.step < len(self.tape.steps):
            return materialised(recorded.x_next, self.latents.device)
        if self.latents.shape != recorded.x_next.shape:
            raise ReplayError(
                f"latents to decode have shape {list(self.latents.shape)}, those of the rollout "
                f"{list(recorded.x_next.shape)}: expected one row per sample of the tape"
            )
        torch.set_grad_enabled(self.latents.requires_grad)
        return self.latents.clone()  # pipelines write into what they get, which torch refuses for a leaf


def _pixels(output: object) -> torch.Tensor:
    """The images or videos of a pipeline's output, fp32."""
    given = dict(output.items()) if hasattr(output, "items") else {}
    found = next((given[name] for name in ("images", "frames", "image") if given.get(name) is not None), None)
    if isinstance(found, list) and found and all(torch.is_tensor(part) for part in found):
        found = torch.stack(found)
    if not torch.is_tensor(found) or found.ndim not in (4, 5):
        named = ", ".join(f"{name}: {type(value).__name__}" for name, value in given.items()) or type(output).__name__
        raise ReplayError(
            f"the pipeline was asked for tensors and returned {named}: its images cannot be differentiated"
        )
    return found[:, 0].float() if found.ndim == 5 and found.shape[1] == 1 else found.float()


def _recompute(pipe: DiffusionPipeline) -> None:
    """Let the VAEs of `pipe` recompute their activations in a backward pass, those that can.

    That stays so: the backward pass comes later, and without gradient it changes nothing.
    """
    for part in pipe.components.values():
        if hasattr(part, "decode") and getattr(part, "_supports_gradient_checkpointing", False):
            part.enable_gradient_checkpointing()
