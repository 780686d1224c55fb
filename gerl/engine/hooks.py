"""Hooks that route a pipeline's calls to a head that records or replays: gerl's only patches, always undone."""

from __future__ import annotations  # annotations name diffusers classes, which the driver of a run does not import

import contextlib
import functools
import inspect
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from gerl.engine.rows import Tree, detached_copy, leading, materialised
from gerl.engine.tape import ComponentCall, Tape
from gerl.engine.transitions import (
    COUNTS_STEPS,
    GIVES_MODEL_DTYPE,
    Timestep,
    family,
    lcm_clean,
    predicts_clean,
    scm_clean,
    step_index,
)
from gerl.errors import ModelError, ReplayError

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline, SchedulerMixin
    from diffusers.guiders.guider_utils import GuiderOutput
    from diffusers.schedulers.scheduling_lcm import LCMSchedulerOutput
    from diffusers.schedulers.scheduling_scm import SCMSchedulerOutput
    from diffusers.schedulers.scheduling_utils import SchedulerOutput

# methods that compute or sample outside the denoiser: embeddings, latents, ids, rewritten prompts, prior tokens.
# `prepare_extra_step_kwargs` inspects the scheduler's signature and must run, as must the method that writes noisier
# conditions into the latents of each step (LTX), since a replay may have other latents; its noise is answered.
ANSWERED = re.compile(
    r"_?(encode|prepare(?!_extra_step)|generate|enhance|upsample_prompt|rewire|expand_prompts"
    r"|add_noise(?!_to_image_cond)|get_image_caption)(_|$)"
)


class StopPipeline(BaseException):
    """Early exit from a pipeline's `__call__`; a `BaseException` so that no pipeline catches it."""


class LatentsTracker:
    """Compares the latents at the start of a scheduler step with those that the step before passed to the pipeline.

    Most pipelines pass on the same unmodified tensor, which needs no comparison. Others are compared on their device
    without synchronising; `resolve` reads all results at once at the end of the pipeline's call.
    """

    def __init__(self) -> None:
        # id of a scheduler -> fp32 latents, the copy passed to the pipeline, and the version of that copy
        self.passed: dict[int, tuple[torch.Tensor, torch.Tensor, int]] = {}
        self._pending: list[tuple[torch.Tensor, Callable[[bool], None]]] = []

    def source_of(self, scheduler: SchedulerMixin, sample: torch.Tensor) -> torch.Tensor | None:
        """Return the fp32 latents of which `sample` is the unmodified copy, None if it is another tensor."""
        exact, copied, version = self.passed.get(id(scheduler), (None, None, 0))
        return exact if copied is sample and copied._version == version else None

    def defer(self, flag: torch.Tensor, act: Callable[[bool], None]) -> None:
        """Call `act(flag)` when the pipeline's call has ended; `flag`: a scalar on any device."""
        self._pending.append((flag, act))

    def refuse_if(self, flag: torch.Tensor, message: str) -> None:
        """Raise `ReplayError` when the pipeline's call has ended if the scalar `flag` is true."""

        def act(refused: bool) -> None:
            if refused:
                raise ReplayError(message)

        self.defer(flag, act)

    def expect(self, expected: torch.Tensor, sample: torch.Tensor, source: torch.Tensor | None, message: str) -> None:
        """Raise `ReplayError` unless `sample` is `expected` `[B, ...]` in its dtype; `source`: see `source_of`.

        Different values raise it when the pipeline's call has ended, different shapes at once.
        """
        if sample.shape != expected.shape:
            raise ReplayError(message)
        if source is not expected:
            self.refuse_if((expected.to(sample.dtype) != sample).any(), message)

    def resolve(self) -> None:
        """Synchronise once, and call the deferred actions in order."""
        pending, self._pending = self._pending, []
        if pending:
            for is_set, (_, act) in zip(torch.stack([flag for flag, _ in pending]).tolist(), pending, strict=True):
                act(is_set)


class TapeHead(LatentsTracker, ABC):
    """Head that answers from a tape in the recorded order; subclasses override what differs in their kind of pass.

    Every answer is compared with the recording: a pipeline that deviates, because of a cache, random numbers or a
    changed argument, would give plausible but wrong numbers.
    """

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape
        self.device = tape.steps[0].x.device if tape.steps else torch.device("cpu")
        self.step = self.answered = self.accompanied = 0  # counts of scheduler steps, methods and secondary steps
        self.start: dict[int, Tree] = {}  # answers that replace recorded ones, by position
        self.looped = tape.looped_components()
        self.calls = iter([c for c in tape.component_calls if c.component in self.looped])

    def next_answer(self, name: str) -> Tree:
        """Return the recorded value of the next method call `name`. Raises `ReplayError` if the recording differs."""
        if self.answered == len(self.tape.answers) or self.tape.answers[self.answered].method != name:
            raise ReplayError(f"the replay calls {name}, which the rollout did not call at this point")
        self.answered += 1
        return self.start.get(self.answered - 1, self.tape.answers[self.answered - 1].value)

    def recorded(self, call: ComponentCall) -> Tree:
        """Return the output of a recorded call, with zeros if only the shape was kept."""
        return materialised(detached_copy(call.output), self.device)

    @abstractmethod
    def next_latents(
        self, model_output: torch.Tensor, sample: torch.Tensor, source: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the latents after a scheduler step from `sample`, fp32; `source`: see `source_of`."""

    def on_method(self, name: str, method: Callable[..., object], *args: object, **kwargs: object) -> object:
        del method, args, kwargs
        return detached_copy(self.next_answer(name))

    def on_component(self, name: str, forward: Callable[..., object], *args: object, **kwargs: object) -> object:
        call = next(self.calls, None) if name in self.looped else None
        return forward(*args, **kwargs) if call is None else self.recorded(call)

    def next_secondary(self, sample: torch.Tensor, source: torch.Tensor | None) -> torch.Tensor:
        """Return the latents after a secondary step. Raises `ReplayError` if it starts at other latents."""
        recorded = self.tape.companion(self.accompanied)
        self.accompanied += 1
        self.expect(recorded.x, sample, source, recorded.deviation)
        return recorded.x_next


class RolloutHead(LatentsTracker, ABC):
    """Head that samples: the pipeline computes, and the head takes its steps."""

    @abstractmethod
    def on_method(self, name: str, method: Callable[..., object], *args: object, **kwargs: object) -> object:
        """Call a method of the pipeline, and return its value."""

    @abstractmethod
    def on_component(self, name: str, forward: Callable[..., object], *args: object, **kwargs: object) -> object:
        """Call a component of the pipeline, and return its output."""

    @abstractmethod
    def on_scheduler_step(
        self, scheduler: SchedulerMixin, model_output: torch.Tensor, timestep: Timestep, sample: torch.Tensor
    ) -> torch.Tensor:
        """Return the latents after a scheduler step from `sample`, `[B, ...]` fp32."""

    @abstractmethod
    def on_secondary_step(
        self, scheduler: SchedulerMixin, model_output: torch.Tensor, timestep: Timestep, sample: torch.Tensor
    ) -> torch.Tensor:
        """Return the latents of the secondary modality after its step."""


def rerun(pipe: DiffusionPipeline, head: TapeHead, **overrides: object) -> object:
    """Run the call of `head.tape` again, with gradient if enabled; return its output, None if the head stopped it."""
    undecorated = inspect.unwrap(type(pipe).__call__)  # diffusers decorates it with torch.no_grad
    output: object = None
    with routed(pipe, head), contextlib.suppress(StopPipeline):
        output = undecorated(pipe, **head.tape.fresh_call() | overrides)
    head.resolve()
    return output


class _Step:
    """`scheduler.step` routed to a head.

    Pipelines with two modalities (video and sound) deep-copy their scheduler; the copy has a copy of this object, bound
    to the copied scheduler and the same head. If the pipeline's own scheduler steps first, the steps of its copies
    belong to the secondary modality.
    """

    def __init__(self, head: RolloutHead | TapeHead, scheduler: SchedulerMixin) -> None:
        self.head, self.scheduler = head, scheduler
        self.own = scheduler
        self.family = family(scheduler)
        self.first: list[SchedulerMixin] = []  # the scheduler that stepped first, shared by all copies
        functools.update_wrapper(self, scheduler.step)  # pipelines inspect its signature

    def __deepcopy__(self, memo: dict[int, SchedulerMixin]) -> _Step:
        copied = object.__new__(_Step)
        copied.__dict__.update(self.__dict__)
        copied.scheduler = memo.get(id(self.scheduler), self.scheduler)
        return copied

    def __call__(
        self,
        model_output: torch.Tensor,
        timestep: Timestep,
        sample: torch.Tensor,
        *_: object,
        return_dict: bool = True,
        per_token_timesteps: torch.Tensor | None = None,
        pred_original_sample: torch.Tensor | None = None,
        r_timestep: Timestep | None = None,
        **__: object,
    ) -> SchedulerOutput | SCMSchedulerOutput | LCMSchedulerOutput | tuple[torch.Tensor, ...] | LazySchedulerOutput:
        # imported lazily: the driver of a run does not need diffusers
        from diffusers.schedulers.scheduling_lcm import LCMSchedulerOutput
        from diffusers.schedulers.scheduling_scm import SCMSchedulerOutput
        from diffusers.schedulers.scheduling_utils import SchedulerOutput

        scheduler = self.scheduler
        if r_timestep is not None:
            raise ModelError(
                "the pipeline jumps to noise levels of its own choice (r_timestep), which are not in the schedule: "
                "gerl takes the steps of the schedule"
            )
        if per_token_timesteps is not None:
            # tokens have individual noise levels, and the output is the negative velocity (LTX). Tokens that the
            # pipeline keeps are all at the level of the step; it resets the others
            model_output = -model_output
        if self.family == "edm":
            return LazySchedulerOutput(self._next_of, scheduler, (model_output, timestep, sample), pred_original_sample)
        dtype = model_output.dtype if self.family in GIVES_MODEL_DTYPE else sample.dtype
        dtype = torch.float32 if per_token_timesteps is not None else dtype
        x_next = self._next_of(model_output, timestep, sample, dtype)
        decoding = getattr(self.head, "hands_out_clean", False)
        # pipelines of consistency models decode the clean latents of the last step
        if self.family == "trigflow":
            clean = x_next if decoding else scm_clean(timestep, model_output, sample)
            return SCMSchedulerOutput(x_next, clean) if return_dict else (x_next, clean)
        if self.family == "lcm":
            clean = x_next if decoding else lcm_clean(scheduler, timestep, model_output, sample)
            return LCMSchedulerOutput(x_next, clean) if return_dict else (x_next, clean)
        return SchedulerOutput(prev_sample=x_next) if return_dict else (x_next,)

    def _next_of(
        self, model_output: torch.Tensor, timestep: Timestep, sample: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the head's next latents, a copy in `dtype`, since some pipelines write into it."""
        scheduler = self.scheduler
        if not self.first:
            self.first.append(scheduler)
        goes_along = self.first[0] is self.own is not scheduler
        if isinstance(self.head, TapeHead):
            # pipelines that noise an image for the next step (inpainting) look up its sigma by the step index
            if self.family in COUNTS_STEPS:
                if scheduler.step_index is None:
                    scheduler._init_step_index(timestep)
                scheduler._step_index += 1
            source = self.head.source_of(scheduler, sample)
            secondary, trained = self.head.next_secondary, self.head.next_latents
            exact = secondary(sample, source) if goes_along else trained(model_output, sample, source)
        else:
            step = self.head.on_secondary_step if goes_along else self.head.on_scheduler_step
            exact = step(scheduler, model_output, timestep, sample)
        x_next = exact.to(dtype, copy=True)
        self.head.passed[id(scheduler)] = exact, x_next, x_next._version
        return x_next


class LazySchedulerOutput:
    """Result of `EDMEulerScheduler.step`, with next and clean latents computed on access.

    Cosmos 1 steps twice: it reads the clean latents of a first step, on a batch that may be doubled for guidance, takes
    the step back, guides them and steps with them (`known`). Reading the next latents makes it a step of the rollout.
    """

    def __init__(
        self,
        next_of: Callable[[torch.Tensor, Timestep, torch.Tensor, torch.dtype], torch.Tensor],
        scheduler: SchedulerMixin,
        arguments: tuple[torch.Tensor, Timestep, torch.Tensor],
        known: torch.Tensor | None,
    ) -> None:
        self.next_of, self.scheduler, self.given, self.known = next_of, scheduler, arguments, known
        self.index = step_index(scheduler, arguments[1])
        self.taken: torch.Tensor | None = None
        scheduler._step_index = self.index + 1

    @property
    def prev_sample(self) -> torch.Tensor:
        """Next latents."""
        if self.taken is None:
            model_output, timestep, sample = self.given
            self.scheduler._step_index = self.index
            with predicts_clean(self.scheduler, self.known is not None):
                output = model_output if self.known is None else self.known
                self.taken = self.next_of(output, timestep, sample, model_output.dtype)
        return self.taken

    @property
    def pred_original_sample(self) -> torch.Tensor:
        """Clean latents predicted by the model output, by the scheduler's own arithmetic."""
        if self.known is not None:
            return self.known
        model_output, _, sample = self.given
        clean: torch.Tensor = self.scheduler.precondition_outputs(
            sample.float(), model_output, self.scheduler.sigmas[self.index]
        )
        return clean

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter((self.prev_sample, self.pred_original_sample))

    def __getitem__(self, place: int) -> torch.Tensor:
        return self.prev_sample if range(2)[place] == 0 else self.pred_original_sample

    def __len__(self) -> int:
        return 2


@dataclass
class Evaluations:
    """Counts of a denoiser's evaluations on one image: forward passes, and those followed by a backward pass."""

    forward: int = 0
    backward: int = 0

    def taken(self) -> tuple[int, int]:
        """Return both numbers and reset them."""
        numbers = (self.forward, self.backward)
        self.forward = self.backward = 0
        return numbers

    def call(self, forward: Callable[..., Any], *args: object, **kwargs: object) -> Any:
        """Call the denoiser's `forward` and count its rows."""
        output = forward(*args, **kwargs)
        rows = len(leading(output))
        self.forward += rows
        self.backward += rows if torch.is_grad_enabled() else 0
        return output


COUNTED: WeakKeyDictionary[torch.nn.Module, Evaluations] = WeakKeyDictionary()


def count_evaluations(denoisers: Iterable[torch.nn.Module]) -> Evaluations:
    """Count the evaluations of `denoisers` in records and replays from now on; calls answered from a tape are none."""
    evaluations = Evaluations()
    COUNTED.update(dict.fromkeys(denoisers, evaluations))
    return evaluations


@contextlib.contextmanager
def uncounted(pipe: DiffusionPipeline) -> Iterator[None]:
    """Exclude the block from the count: validations, and calls that probe how the pipeline calls its denoisers."""
    modules = [component for component in pipe.components.values() if isinstance(component, torch.nn.Module)]
    counts = [(e, e.forward, e.backward) for e in map(COUNTED.get, modules) if e is not None]
    yield
    for evaluations, forward, backward in counts:
        evaluations.forward, evaluations.backward = forward, backward


@contextlib.contextmanager
def routed(pipe: DiffusionPipeline, head: RolloutHead | TapeHead) -> Iterator[None]:
    """Route `scheduler.step`, the answered methods, `randn_tensor` and the components' forward of `pipe` to `head`.

    Attributes are set on the instances only, except `randn_tensor`, which is a name in the pipeline's modules and in
    diffusers' VAE module: pipelines that sample noise inline have no method to route.
    """
    # imported lazily: the driver of a run does not need diffusers
    from diffusers.models.autoencoders import vae as vae_module
    from torch.distributed.fsdp import FSDPModule

    with contextlib.ExitStack() as undo:

        def put_routed(target: object, name: str, route: Callable[..., object], label: str) -> None:
            original = called = getattr(target, name)
            # a replay counts by itself: not all of its calls run the denoiser
            if isinstance(head, RolloutHead) and isinstance(target, torch.nn.Module) and target in COUNTED:
                called = functools.partial(COUNTED[target].call, original)
            put(undo, target, name, functools.update_wrapper(functools.partial(route, label, called), original))

        put(undo, pipe.scheduler, "step", _Step(head, pipe.scheduler))
        for name in dir(type(pipe)):
            if ANSWERED.match(name) and callable(getattr(type(pipe), name)):
                put_routed(pipe, name, head.on_method, name)
        for module in {sys.modules[cls.__module__] for cls in type(pipe).__mro__} | {vae_module}:
            if "randn_tensor" in module.__dict__:
                put_routed(module, "randn_tensor", head.on_method, "randn_tensor")
        for name, component in pipe.components.items():
            if isinstance(component, torch.nn.Module):
                call = "forward"
                if component._compiled_call_impl is not None:  # module.compile() bypasses forward
                    call = "_compiled_call_impl"
                elif isinstance(component, FSDPModule):
                    # outside its hooks, which gather the weights: neither the cut of the graph nor the pending backward
                    # pass of the previous step may come between them and the forward pass
                    call = "_compiled_call_impl"
                    put(undo, component, call, component._call_impl)
                put_routed(component, call, head.on_component, name)
        yield


@contextlib.contextmanager
def noise_from(scheduler: SchedulerMixin, generator: torch.Generator | Sequence[torch.Generator]) -> Iterator[None]:
    """Let a consistency model's scheduler use `generator` (one, or one per sample) if its pipeline passes none.

    Flow-matching pipelines expect no scheduler that samples noise, and would use the global generator.
    """
    with contextlib.ExitStack() as undo:
        if family(scheduler) == "flow_lcm":
            put(undo, scheduler, "step", functools.partial(scheduler.step, generator=generator))
        yield


@contextlib.contextmanager
def unguided(pipe: DiffusionPipeline) -> Iterator[None]:
    """Let the guiders of `pipe` return the conditional output; some would divide by a distance of 0."""

    def hand_on(pred_cond: torch.Tensor, pred_uncond: torch.Tensor | None = None, **_: torch.Tensor) -> GuiderOutput:
        from diffusers.guiders.guider_utils import GuiderOutput  # imported lazily: only newer pipelines have guiders

        return GuiderOutput(pred=pred_cond, pred_cond=pred_cond, pred_uncond=pred_uncond)

    with contextlib.ExitStack() as undo:
        for component in pipe.components.values():
            if any(kind.__name__ == "BaseGuidance" for kind in type(component).__mro__):
                put(undo, component, "forward", hand_on)
        yield


def put(undo: contextlib.ExitStack, target: object, name: str, value: object) -> None:
    """Set an attribute on this instance only, until `undo` exits."""
    attributes = target.__dict__
    if name in attributes:
        undo.callback(attributes.__setitem__, name, attributes[name])
    else:
        undo.callback(attributes.pop, name)
    attributes[name] = value
