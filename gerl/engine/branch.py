"""Branching: rollouts that share the beginning of a recorded one, for tree algorithms.

The pipeline's own `__call__` runs again. Before the branching step it is answered from the tape, as in a replay:
methods, components and scheduler steps return the recorded values of the parents, and nothing is computed. At the
branching step the pipeline forms its model output from the denoiser's recorded output, and from there it is a rollout.
"""

from __future__ import annotations  # annotations name diffusers classes, which the driver of a run does not import

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch.utils._pytree import tree_any

from gerl.engine.feature_cache import NO_CACHE, FeatureCache
from gerl.engine.record import Recorder, SamplingPlan, check_generators, checked_plan, record_batch_probe
from gerl.engine.rows import detached_copy, materialised
from gerl.engine.tape import Tape, TapeStep
from gerl.engine.transitions import Timestep, advance
from gerl.errors import ModelError, ReplayError

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline, SchedulerMixin
    from diffusers.utils import BaseOutput


def branch(
    pipe: DiffusionPipeline,
    tape: Tape,
    step: int,
    index: Sequence[int],
    kernel: str = "flow_sde",
    noise_level: float = 0.7,
    window: Iterable[int] | None = None,
    generators: Sequence[torch.Generator] | None = None,
    *,
    solver: str = "euler",
    compression: float = 1.0,
    stop: int | None = None,
    noise_at: Mapping[int, float] | None = None,
    cache: FeatureCache = NO_CACHE,
) -> tuple[BaseOutput | None, Tape]:
    """Branch off the samples `index` of `tape` at step `step`; return the output and the tape of the children.

    `index`: the parent of each child, repeats allowed. `window`: the stochastic steps, from `step` on; None: all but
    the last. `generators`: one per child, for its step noise. The other arguments are those of `record`. The children's
    tape can be replayed and branched like any other; its steps before `step` are the parents'. For TempFlow-GRPO (arXiv
    2508.04324) and BranchGRPO (arXiv 2509.06040).

    The denoiser is not called up to and including `step`. A missing probe is recorded and stored on `tape`: of one
    sample, or of two if the tape has only one.

    Raises `ReplayError` if `tape` cannot be branched at `step` or the pipeline deviates from the recording,
    `ModelError` if `window` or `stop` name an invalid step.
    """
    plan = checked_plan(kernel, noise_level, solver, compression, cache, window, stop, noise_at)
    return branch_plan(pipe, tape, step, index, plan, generators)


def branch_plan(
    pipe: DiffusionPipeline,
    tape: Tape,
    step: int,
    index: Sequence[int],
    plan: SamplingPlan,
    generators: Sequence[torch.Generator] | None = None,
) -> tuple[BaseOutput | None, Tape]:
    """Branch with a `SamplingPlan`; see `branch`."""
    check_fork(tape, step, index)
    window, stop = plan.window, plan.stop
    if min(window or (), default=step) < step or (stop is not None and stop < step):
        raise ModelError(f"a branch at step {step} has no window {sorted(window or ())} and no stop {stop} before it")
    whole = tuple(index) == tuple(range(tape.batch_size))
    if not whole and (tape.probe is None or tape.probe.batch_size == tape.batch_size):
        tape.probe = record_batch_probe(pipe, tape.call, [0] if tape.batch_size > 1 else [0, 0])
    check_generators(generators, len(index))
    parents = tape.rows(index)
    child = Tape(parents.fresh_call(), len(index), probe=parents.probe)
    if parents.features is not None:  # of the steps up to the branch
        child.features = parents.features.rows(range(len(index)), len(index))
    return BranchRecorder(parents, step, child, plan, generators).run(pipe, generators), child


def check_fork(tape: Tape, fork: int, index: Sequence[int]) -> None:
    """Raise `ReplayError` if the samples `index` of `tape` cannot be branched at step `fork`."""
    calls = tape.component_calls
    if tape.reads is not None:
        raise ReplayError("a compacted tape cannot be branched: branch before compacting it")
    if any(c.fills for c in calls if c.step <= fork):
        raise ReplayError(
            "the denoiser fills a cache that later steps read, which a branch would not have: use an algorithm that "
            "does not branch, such as flow_grpo"
        )
    if not index or set(index) - set(range(tape.batch_size)):
        raise ReplayError(f"samples {list(index)} cannot be branched: the tape has {tape.batch_size} samples")
    if not 0 <= fork < len(tape.steps) + any(c.step == len(tape.steps) for c in calls):
        raise ReplayError(f"step {fork} cannot be branched at: the tape has {len(tape.steps)} steps")
    if fork < len(tape.steps) and tape.steps[fork].rule.dt == 0:
        raise ReplayError(f"step {fork} cannot be branched at: compression skipped it")


class BranchRecorder(Recorder):
    """Head of a branch: the parents' answers up to step `fork`, then a rollout."""

    def __init__(
        self, parents: Tape, fork: int, tape: Tape, plan: SamplingPlan, generators: Sequence[torch.Generator] | None
    ) -> None:
        super().__init__(tape, plan, generators)
        self.parents, self.fork = parents, fork
        calls = parents.component_calls
        self.looped = {c.component for c in calls if c.step > 0}
        self.denoisers = set({c.step: c.component for c in calls if c.step <= fork}.values())  # last of each step

    def on_method(self, name: str, method: Callable[..., object], *args: object, **kwargs: object) -> object:
        if self.depth or self._is_live():
            return super().on_method(name, method, *args, **kwargs)
        position = len(self.tape.answers)
        recorded = self.parents.answers[position] if position < len(self.parents.answers) else None
        if recorded is None or recorded.method != name:
            raise ReplayError(f"the branch calls {name}, which the recording did not call at this point")
        self.tape.answers.append(recorded)
        return detached_copy(recorded.value)

    def on_component(self, name: str, forward: Callable[..., object], *args: object, **kwargs: object) -> object:
        if self.depth or self._is_live():
            return super().on_component(name, forward, *args, **kwargs)
        k, position, calls = len(self.tape.steps), len(self.tape.component_calls), self.parents.component_calls
        recorded = calls[position] if position < len(calls) else None
        if recorded is None or (recorded.component, recorded.step) != (name, k):
            raise ReplayError(f"the branch calls {name} at step {k}, which the recording did not")
        if tree_any(lambda v: torch.is_tensor(v) and v.is_meta, recorded.output):
            # a shape is enough for a ControlNet, whose output is read only by the denoiser, which does not run, but not
            # for the denoiser itself, nor for components called once before the loop, which have to run again
            if name in self.denoisers:
                raise ReplayError(
                    f"the output of {name} was too large to be kept: record with stop={self.fork}, which keeps it "
                    "for branching"
                )
            if name not in self.looped:
                return super().on_component(name, forward, *args, **kwargs)
        self.tape.component_calls.append(replace(recorded))
        device = self.parents.steps[0].x.device if self.parents.steps else None
        return materialised(detached_copy(recorded.output), device)

    def on_scheduler_step(
        self, scheduler: SchedulerMixin, model_output: torch.Tensor, timestep: Timestep, sample: torch.Tensor
    ) -> torch.Tensor:
        k = len(self.tape.steps)
        step = None if self._is_live() else self._parents_step(k, scheduler, sample)
        if step is None or k == self.fork:
            return super().on_scheduler_step(scheduler, model_output, timestep, sample)
        self._arrive(k, scheduler, timestep, sample)
        advance(scheduler, timestep)
        self.transitions.solver.observe(scheduler, step.rule, step.x, model_output)
        self.tape.steps.append(step)
        self.carried[id(scheduler)] = step.x_next
        return step.x_next

    def on_secondary_step(
        self, scheduler: SchedulerMixin, model_output: torch.Tensor, timestep: Timestep, sample: torch.Tensor
    ) -> torch.Tensor:
        if self._is_live():
            return super().on_secondary_step(scheduler, model_output, timestep, sample)
        recorded = self.parents.companion(len(self.tape.companions))
        self.expect(recorded.x, sample, self.source_of(scheduler, sample), recorded.deviation)
        advance(scheduler, timestep)
        self.tape.companions.append(recorded)
        self.carried[id(scheduler)] = recorded.x_next
        return recorded.x_next

    def _parents_step(self, k: int, scheduler: SchedulerMixin, sample: torch.Tensor) -> TapeStep | None:
        """Return the parents' step `k`, None if their tape was stopped before it; `sample`: the pipeline's latents."""
        if k == len(self.parents.steps):
            return None
        recorded, answers = self.parents.steps[k], len(self.tape.answers)
        message = f"the pipeline did not reach the recorded latents at step {k}: it cannot be branched"
        self.expect(recorded.x, sample, self.source_of(scheduler, sample), message)
        if answers != recorded.num_answers:
            raise ReplayError(
                f"the pipeline had {answers} outputs at step {k}, {recorded.num_answers} in the recording: it "
                "samples noise once per sample and can only be branched in whole batches"
            )
        return recorded

    def _is_live(self) -> bool:
        return len(self.tape.steps) > self.fork
