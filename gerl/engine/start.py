"""Initial latents given by the caller, put where the pipeline takes its own from.

Mostly the pipeline hands what `prepare_latents` returned to the scheduler as it is. Others unpack it, or leave out the
frame that a picture fills: where each value goes is then found by differentiating the pipeline's own arithmetic.
"""

from __future__ import annotations  # of diffusers, which the driver of a run does without

import contextlib
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch.utils._pytree import tree_leaves, tree_map

from gerl.engine.batching import Tree, detached_copy, materialised, select_call
from gerl.engine.instrument import StopPipeline, Timestep, routed
from gerl.engine.tape import Tape
from gerl.errors import ReplayError

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline, SchedulerMixin

UNTRACEABLE = "latents cannot be given for step 0: the pipeline does not pass on its initial latents value by value"


def started_at(pipe: DiffusionPipeline, tape: Tape, given: torch.Tensor) -> dict[int, Tree]:
    """`{position: value}` of the answers of `tape` that start the pipeline at the latents `given` `[B, ...]`.

    Raises `ReplayError` where no answer, or more than one, hands its values on to the first step.
    """
    start = tape.steps[0].x
    answers = {i: answer.value for i, answer in enumerate(tape.answers[: tape.steps[0].num_answers])}

    def is_start(value: object) -> bool:
        alike = isinstance(value, torch.Tensor) and value.shape == start.shape
        return isinstance(value, torch.Tensor) and alike and torch.equal(value, start.to(value.dtype))

    positions = [i for i, value in answers.items() for leaf in tree_leaves(value) if is_start(leaf)]
    if len(positions) != 1:  # the noise that inpainting keeps may be the same as the initial latents
        return _traced(pipe, tape, given)

    def swap(value: object) -> object:
        return given.to(value.dtype, copy=True) if isinstance(value, torch.Tensor) and is_start(value) else value

    return {positions[0]: tree_map(swap, answers[positions[0]])}


def _traced(pipe: DiffusionPipeline, tape: Tape, given: torch.Tensor) -> dict[int, Tree]:
    tracer = _Tracer(tape)
    undecorated = inspect.unwrap(type(pipe).__call__)
    with torch.enable_grad(), routed(pipe, tracer), contextlib.suppress(StopPipeline):
        undecorated(pipe, **select_call(tape.call, range(tape.batch_size)))
    sample = tracer.sample
    if sample is None or not sample.requires_grad or sample.shape != given.shape:
        raise ReplayError(UNTRACEABLE)
    leaves = [leaf for _, leaf in tracer.leaves]

    def moved(weights: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return torch.autograd.grad(sample, leaves, weights, retain_graph=True, allow_unused=True)

    found = _handed_on(moved(torch.ones_like(sample)))
    if len(found) > 1 and (free := _free(tape, sample)) is not None:
        # a condition may be handed on as well, to where the pipeline writes it again in each step
        found = _handed_on(moved(free))
    if len(found) != 1:
        raise ReplayError(UNTRACEABLE)
    ((number, handed_on, scale),) = found
    value = moved(given.to(sample.dtype))[number]
    assert value is not None
    position, leaf = tracer.leaves[number]
    new = torch.where(handed_on, value / scale**2, leaf.detach())  # value is scale times given, the pipeline scales it
    return {position: tree_map(lambda v: new if v is leaf else v, tracer.values[position])}


def _handed_on(derivatives: tuple[torch.Tensor | None, ...]) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
    """Of the tensors that are handed on value by value: their number, which of their values, and what scales these.

    Such values have one derivative (1, or what scales them), in any order and with some left out.
    """
    found = []
    for number, reached in enumerate(derivatives):
        if reached is not None and len(scales := reached[reached != 0].unique()) == 1:
            found.append((number, reached != 0, scales))
    return found


def _free(tape: Tape, sample: torch.Tensor) -> torch.Tensor | None:
    """1 where the pipeline writes nothing into its latents, else 0, as `sample`; None if it writes nowhere."""
    written = [s.written for s in tape.steps if s.written is not None and not s.written.is_meta]
    return (~torch.stack(written).any(0)).to(sample) if written else None


class _Tracer:
    """The head of a pass up to the first step that answers with tensors to differentiate by: see `instrument.Head`."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.looped = tape.looped_components()
        self.calls = iter([c for c in tape.component_calls if c.component in self.looped])
        self.leaves: list[tuple[int, torch.Tensor]] = []  # position of the answer, tensor in it
        self.values: list[Tree] = []  # of the answers, with these tensors
        self.sample: torch.Tensor | None = None

    def on_method(self, name: str, method: Callable[..., object], *args: object, **kwargs: object) -> object:
        del method, args, kwargs
        position = len(self.values)
        if position == len(self.tape.answers) or self.tape.answers[position].method != name:
            raise ReplayError(f"the replay calls {name}, which the rollout did not call at this point")

        def leaf(value: object) -> object:
            if not (isinstance(value, torch.Tensor) and value.is_floating_point()):
                return value
            self.leaves.append((position, value.requires_grad_()))
            return value

        self.values.append(tree_map(leaf, detached_copy(self.tape.answers[position].value)))
        # no leaf itself: pipelines write into what they get
        return tree_map(lambda v: v.clone() if torch.is_tensor(v) else v, self.values[position])

    def on_component(self, name: str, forward: Callable[..., object], *args: object, **kwargs: object) -> object:
        recorded = next(self.calls, None) if name in self.looped else None
        if recorded is None:
            with torch.no_grad():
                return forward(*args, **kwargs)
        return materialised(detached_copy(recorded.output), self.tape.steps[0].x.device)

    def on_scheduler_step(
        self, scheduler: SchedulerMixin, model_output: torch.Tensor, timestep: Timestep, sample: torch.Tensor
    ) -> torch.Tensor:
        del scheduler, model_output, timestep
        self.sample = sample
        raise StopPipeline

    on_companion_step = on_scheduler_step
