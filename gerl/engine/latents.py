"""Latents at both ends of a call: initial ones given by the caller, decoding with gradient, encoding of images."""

from __future__ import annotations  # annotations name diffusers classes, which the driver of a run does not import

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch.utils._pytree import tree_leaves, tree_map

from gerl.engine.hooks import StopPipeline, TapeHead, put, rerun
from gerl.engine.record import DETERMINISTIC, Recorder, fixed_generators
from gerl.engine.rows import Tree, detached_copy, materialised
from gerl.engine.skipping import StructureOnly
from gerl.engine.tape import Tape
from gerl.errors import ModelError, ReplayError

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


# --- Initial latents given by the caller instead of the pipeline's.
#
# Most pipelines pass what `prepare_latents` returned to the scheduler. Others unpack it, or leave out the frame that an
# image fills: the position of each value is then found by differentiating the pipeline's own arithmetic.

UNTRACEABLE = "latents cannot be given for step 0: the pipeline does not pass on its initial latents value by value"


def started_at(pipe: DiffusionPipeline, tape: Tape, latents: torch.Tensor) -> dict[int, Tree]:
    """Return `{position: value}` of the one answer that starts at the `latents`; else raises `ReplayError`."""
    start = tape.steps[0].x
    answers = {i: answer.value for i, answer in enumerate(tape.answers[: tape.steps[0].num_answers])}

    def is_start(value: object) -> bool:
        alike = isinstance(value, torch.Tensor) and value.shape == start.shape
        return isinstance(value, torch.Tensor) and alike and torch.equal(value, start.to(value.dtype))

    positions = [i for i, value in answers.items() for leaf in tree_leaves(value) if is_start(leaf)]
    if len(positions) != 1:  # the noise that inpainting keeps may equal the initial latents
        return _traced(pipe, tape, latents)

    def swap(value: object) -> object:
        return latents.to(value.dtype, copy=True) if isinstance(value, torch.Tensor) and is_start(value) else value

    return {positions[0]: tree_map(swap, answers[positions[0]])}


def _traced(pipe: DiffusionPipeline, tape: Tape, latents: torch.Tensor) -> dict[int, Tree]:
    tracer = _Tracer(tape)
    with torch.enable_grad():
        rerun(pipe, tracer)
    sample = tracer.sample
    if sample is None or not sample.requires_grad or sample.shape != latents.shape:
        raise ReplayError(UNTRACEABLE)
    leaves = [leaf for _, leaf in tracer.leaves]

    def moved(weights: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return torch.autograd.grad(sample, leaves, weights, retain_graph=True, allow_unused=True)

    outputs = _handed_on(moved(torch.ones_like(sample)))
    if len(outputs) > 1 and (free := _free(tape, sample)) is not None:
        # a condition may be passed on too, to positions that the pipeline overwrites in each step
        outputs = _handed_on(moved(free))
    if len(outputs) != 1:
        raise ReplayError(UNTRACEABLE)
    ((number, handed_on, scale),) = outputs
    value = moved(latents.to(sample.dtype))[number]
    assert value is not None
    position, leaf = tracer.leaves[number]
    new = torch.where(handed_on, value / scale**2, leaf.detach())  # value is scale times given, the pipeline scales it
    return {position: tree_map(lambda v: new if v is leaf else v, tracer.values[position])}


def _handed_on(derivatives: tuple[torch.Tensor | None, ...]) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
    """Return index, mask and scale of the tensors whose values are passed on one by one: all with one derivative."""
    outputs = []
    for number, reached in enumerate(derivatives):
        if reached is not None and len(scales := reached[reached != 0].unique()) == 1:
            outputs.append((number, reached != 0, scales))
    return outputs


def _free(tape: Tape, sample: torch.Tensor) -> torch.Tensor | None:
    """Return a mask like `sample`, 1 where the pipeline does not write into its latents; None if it never writes."""
    written = [s.written for s in tape.steps if s.written is not None and not s.written.is_meta]
    return (~torch.stack(written).any(0)).to(sample) if written else None


class _Tracer(TapeHead):
    """Head of a pass up to the first step that answers with leaf tensors to differentiate by."""

    def __init__(self, tape: Tape) -> None:
        super().__init__(tape)
        self.leaves: list[tuple[int, torch.Tensor]] = []  # position of the answer, tensor in it
        self.values: list[Tree] = []  # the answers, with these tensors
        self.sample: torch.Tensor | None = None

    def on_method(self, name: str, method: Callable[..., object], *args: object, **kwargs: object) -> object:
        position, answer = self.answered, detached_copy(self.next_answer(name))

        def leaf(value: object) -> object:
            if not (isinstance(value, torch.Tensor) and value.is_floating_point()):
                return value
            self.leaves.append((position, value.requires_grad_()))
            return value

        self.values.append(tree_map(leaf, answer))
        # clones, since pipelines may modify their inputs, which is not possible for leaves
        return tree_map(lambda v: v.clone() if torch.is_tensor(v) else v, self.values[position])

    def on_component(self, name: str, forward: Callable[..., object], *args: object, **kwargs: object) -> object:
        return super().on_component(name, torch.no_grad()(forward), *args, **kwargs)

    def next_latents(
        self, model_output: torch.Tensor, sample: torch.Tensor, source: torch.Tensor | None
    ) -> torch.Tensor:
        self.sample = sample
        raise StopPipeline

    def next_secondary(self, sample: torch.Tensor, source: torch.Tensor | None) -> torch.Tensor:
        return self.next_latents(sample, sample, source)


# --- Decoding: the end of a recorded call, from latents with gradient to images with gradient.
#
# The pipeline's own `__call__` runs again, answered from the tape. At its last step the scheduler returns the caller's
# latents and gradients are enabled: everything after that (unpacking, scaling, the VAE, the conversion to pixels) is in
# the graph.


def decoded(pipe: DiffusionPipeline, tape: Tape, latents: torch.Tensor) -> torch.Tensor:
    """Decode finished `latents` to images `[B, 3, H, W]` or videos `[B, F, 3, H, W]`, fp32 in [0, 1], with graph.

    `latents`: those after the last step of `tape`, `[B, ...]` fp32, with or without gradient. Enables gradient
    checkpointing on VAEs that support it, permanently. Raises `ReplayError` if the pipeline deviates from the rollout,
    or decodes without gradient. Decode and differentiate within torch's `allow_mutation_on_saved_tensors`: a pipeline
    may overwrite tensors needed by its derivative (Kandinsky 5).
    """
    decoder = Decoder(tape, latents)
    for part in pipe.components.values():  # not undone, since the backward pass comes later
        if hasattr(part, "decode") and getattr(part, "_supports_gradient_checkpointing", False):
            part.enable_gradient_checkpointing()
    # the decoder enables gradients at the last step; leaving no_grad restores the previous mode
    with torch.no_grad():
        try:
            output = rerun(pipe, decoder, output_type="pt")
        except RuntimeError as error:
            if "requires grad" not in str(error):  # from torch, if a pipeline continues in numpy
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


class Decoder(TapeHead):
    """Head of a decoding."""

    hands_out_clean = True  # the latents returned at the last step are the ones to decode

    def __init__(self, tape: Tape, latents: torch.Tensor) -> None:
        super().__init__(tape)
        self.latents, self.device = latents, latents.device

    def on_method(self, name: str, method: Callable[..., object], *args: object, **kwargs: object) -> object:
        # values that were not kept can only be read before the latents are replaced
        return materialised(super().on_method(name, method), self.device)

    def next_latents(
        self, model_output: torch.Tensor, sample: torch.Tensor, source: torch.Tensor | None
    ) -> torch.Tensor:
        if self.step == len(self.tape.steps):
            raise ReplayError(f"when decoding, the pipeline takes more than the {self.step} steps of the rollout")
        recorded = self.tape.steps[self.step]
        self.step += 1
        if self.step < len(self.tape.steps):
            return materialised(recorded.x_next, self.device)
        if self.latents.shape != recorded.x_next.shape:
            raise ReplayError(
                f"latents to decode have shape {list(self.latents.shape)}, those of the rollout "
                f"{list(recorded.x_next.shape)}: expected one row per sample of the tape"
            )
        torch.set_grad_enabled(self.latents.requires_grad)
        return self.latents.clone()  # pipelines may modify the latents, which torch does not allow for a leaf


def _pixels(output: object) -> torch.Tensor:
    """Return the images or videos of a pipeline's output, fp32."""
    outputs = dict(output.items()) if hasattr(output, "items") else {}
    images = next((outputs[name] for name in ("images", "frames", "image") if outputs.get(name) is not None), None)
    if isinstance(images, list) and images and all(torch.is_tensor(part) for part in images):
        images = torch.stack(images)
    if not torch.is_tensor(images) or images.ndim not in (4, 5):
        named = ", ".join(f"{name}: {type(value).__name__}" for name, value in outputs.items()) or type(output).__name__
        raise ReplayError(
            f"the pipeline was asked for tensors and returned {named}: its images cannot be differentiated"
        )
    return images[:, 0].float() if images.ndim == 5 and images.shape[1] == 1 else images.float()


# --- Clean latents of dataset images: the inverse of the path from a pipeline's last step to its VAE.
#
# Between its last scheduler step and `vae.decode(z)` a pipeline unpacks, scales and shifts its latents value by value:
# z = a x0 + b, in any order. Both a and b are found by running the pipeline's own code, with its derivative, from given
# latents up to decoding. For pipelines that do anything else, z is not reproduced.

ENDLESS = 10**9
NEAR = {torch.float32: 1e-4, torch.float64: 1e-4}  # relative error allowed between z and the encoded image
NEAR_IN_HALF = 2e-2
NOT_DECODED = "existing images are not supported with this pipeline: it does not decode its latents with vae.decode"


def record_decoding(pipe: DiffusionPipeline, call: Mapping[str, object]) -> Tape:
    """Record the denoising loop of `pipe(**call)` for replays at given latents, as `record_structure` does.

    The denoiser runs only at steps whose calls differ from the previous step's, mostly once, and nothing is decoded.
    Raises `ModelError` if the pipeline does not decode with `vae`.
    """
    tape = Tape.of(call)
    recorder = _Loop(tape, DETERMINISTIC, None)
    recorder.skipping = StructureOnly(ENDLESS)
    with _decoding(pipe, lambda z: None):
        recorder.run(pipe, fixed_generators(tape.batch_size))
    return tape


class Inverse:
    """Map from the input of a pipeline's VAE decoder to clean latents, for the shapes of a recorded loop."""

    def __init__(self, pipe: DiffusionPipeline, tape: Tape) -> None:
        """Find the map from `tape`, see `record_decoding`; raises `ModelError` if latents reach the VAE otherwise."""
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
        """Shape of the VAE decoder's input."""
        return tuple(self.z.shape)

    def of(self, z: torch.Tensor) -> torch.Tensor:
        """Return the clean latents `[1, ...]` fp32 decoded as `z`; at first raises `ModelError` if there are none."""
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
    """Return the error message for images that cannot be encoded for `pipe`."""
    return (
        f"existing images are not supported with {type(pipe).__name__}: it does not pass its latents to its VAE "
        "value by value, so the latents of an image are unknown"
    )


class _Loop(Recorder):
    def _finish(self) -> None:
        raise ModelError(NOT_DECODED)


class _Tail(TapeHead):
    """Head of a pass that ends with given latents and computes nothing before."""

    def __init__(self, tape: Tape, sample: torch.Tensor) -> None:
        super().__init__(tape)
        self.given, self.device = sample, sample.device

    def on_method(self, name: str, method: Callable[..., object], *args: object, **kwargs: object) -> object:
        answers = self.tape.answers
        if self.answered < len(answers) and answers[self.answered].method == name:
            return materialised(super().on_method(name, method), self.device)
        return method(*args, **kwargs)

    def on_component(self, name: str, forward: Callable[..., object], *args: object, **kwargs: object) -> object:
        return super().on_component(name, torch.no_grad()(forward), *args, **kwargs)

    def next_latents(
        self, model_output: torch.Tensor, sample: torch.Tensor, source: torch.Tensor | None
    ) -> torch.Tensor:
        self.step += 1
        return self.given if self.step == len(self.tape.steps) else self.tape.steps[self.step - 1].x_next

    def next_secondary(self, sample: torch.Tensor, source: torch.Tensor | None) -> torch.Tensor:
        return sample


def _decoded(pipe: DiffusionPipeline, tape: Tape, latents: torch.Tensor) -> torch.Tensor | None:
    """Return the input of `vae.decode` if the last step ends at `latents`, with gradient; None if not reached."""
    outputs: list[torch.Tensor] = []
    with torch.enable_grad(), _decoding(pipe, outputs.append):
        rerun(pipe, _Tail(tape, latents))
    return outputs[0] if outputs and torch.is_tensor(outputs[0]) else None


@contextlib.contextmanager
def _decoding(pipe: DiffusionPipeline, take: Callable[[torch.Tensor], object]) -> Iterator[None]:
    """Stop the pipeline at `vae.decode` in the block, and pass its argument to `take`."""
    vae = getattr(pipe, "vae", None)
    if not isinstance(vae, torch.nn.Module) or not hasattr(vae, "decode"):
        raise ModelError(f"existing images are not supported with {type(pipe).__name__}: it has no VAE")

    def stop(z: torch.Tensor, *_: object, **__: object) -> object:
        take(z)
        raise StopPipeline

    with contextlib.ExitStack() as undo:
        put(undo, vae, "decode", stop)
        yield
