"""Branch: rollouts that share the beginning of a recorded one, for tree algorithms.

The pipeline's own `__call__` runs again. Before the branching step it is answered from the tape, as in a replay:
methods, components and scheduler steps give the recorded values of the parents, and nothing is computed. At the
branching step the pipeline forms its model output from what the denoiser said in the recording, and from there on it is
a rollout.
"""

from __future__ import annotations  # of diffusers, which the driver of a run does without

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch.utils._pytree import tree_any

from gerl.engine.batching import detached_copy, materialised, select_call
from gerl.engine.families import advance
from gerl.engine.feature_cache import NO_CACHE, FeatureCache
from gerl.engine.instrument import Timestep
from gerl.engine.record import Recorder, check_generators, record_probe
from gerl.engine.tape import Tape, TapeStep
from gerl.engine.transitions import Sampler
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
    """Go on from step `step` of the samples `index` of `tape`; return the pipeline's output and the children's tape.

    `index`: the parent of each child, repeats allowed. `window`: the stochastic steps, from `step` on, None: all but
    the last. `generators`: one per child, for its step noise. The other arguments are those of `record`. The tape of
    the children can be replayed and branched as any; its steps before `step` are the parents'. For TempFlow-GRPO
    (arXiv 2508.04324) and BranchGRPO (arXiv 2509.06040).

    The denoiser is not called up to and including `step`. A probe that `tape` lacks is made and kept on it: of one
    sample, or of two where the tape has only one.

    Raises `ReplayError` where `tape` cannot be branched at `step` or the pipeline does not do what it did in the
    recording, `ModelError` where `window` or `stop` name a step that cannot be.
    """
    check_fork(tape, step, index)
    window = None if window is None else frozenset(window)
    if min(window or (), default=step) < step or (stop is not None and stop < step):
        raise ModelError(f"a branch at step {step} has no window {sorted(window or ())} and no stop {stop} before it")
    whole = tuple(index) == tuple(range(tape.batch_size))
    if not whole and (tape.probe is None or tape.probe.batch_size == tape.batch_size):
        tape.probe = record_probe(pipe, tape.call, [0] if tape.batch_size > 1 else [0, 0])
    check_generators(generators, len(index))
    parents = tape.rows(index)
    child = Tape(select_call(tape.call, index), len(index), probe=parents.probe)
    sampler = Sampler(kernel, noise_level, solver, compression, cache)
    recorder = BranchRecorder(parents, step, child, sampler, window, generators, stop, noise_at)
    return recorder.run(pipe, select_call(tape.call, index), generators), child


def check_fork(tape: Tape, fork: int, index: Sequence[int]) -> None:
    """Raise `ReplayError` if the samples `index` of `tape` cannot be branched at step `fork`."""
    calls = tape.component_calls
    if tape.reads is not None:
        raise ReplayError("a lean tape cannot be branched: branch before making it lean")
    if not index or set(index) - set(range(tape.batch_size)):
        raise ReplayError(f"samples {list(index)} cannot be branched: the tape has {tape.batch_size} samples")
    if not 0 <= fork < len(tape.steps) + any(c.step == len(tape.steps) for c in calls):
        raise ReplayError(f"step {fork} cannot be branched at: the tape has {len(tape.steps)} steps")
    if fork < len(tape.steps) and tape.steps[fork].rule.dt == 0:
        raise ReplayError(f"step {fork} cannot be branched at: compression skipped it")


class BranchRecorder(Recorder):
    """The head of a branch: the parents' answers up to step `fork`, then a rollout. See `instrument.Head`."""

    def __init__(
        self,
        parents: Tape,
        fork: int,
        tape: Tape,
        sampler: Sampler,
        window: Iterable[int] | None,
        generators: Sequence[torch.Generator] | None,
        stop: int | None,
        noise_at: Mapping[int, float] | None,
    ) -> None:
        super().__init__(tape, sampler, window, generators, stop, noise_at)
        self.parents, self.fork = parents, fork
        calls = parents.component_calls
        self.looped = {c.component for c in calls if c.step > 0}
        self.denoisers = set({c.step: c.component for c in calls if c.step <= fork}.values())  # the last of each step

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
            # the shape serves for a ControlNet, whose only reader is the denoiser, which does not run; but not for the
            # denoiser itself, nor for what was called once before the loop, which has to run again
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
        step = None if self._is_live() else self._parents_step(k, sample)
        if step is None or k == self.fork:
            return super().on_scheduler_step(scheduler, model_output, timestep, sample)
        self._arrive(k, scheduler, timestep, sample)
        advance(scheduler, timestep)
        self.solver.observe(scheduler, step.rule, step.x, model_output)
        self.tape.steps.append(step)
        self.carried[id(scheduler)] = step.x_next
        return step.x_next

    def on_companion_step(
        self, scheduler: SchedulerMixin, model_output: torch.Tensor, timestep: Timestep, sample: torch.Tensor
    ) -> torch.Tensor:
        if self._is_live():
            return super().on_companion_step(scheduler, model_output, timestep, sample)
        recorded = self.parents.companion(len(self.tape.companions), sample)
        advance(scheduler, timestep)
        self.tape.companions.append(recorded)
        self.carried[id(scheduler)] = recorded.x_next
        return recorded.x_next

    def _parents_step(self, k: int, sample: torch.Tensor) -> TapeStep | None:
        """The parents' step `k`, None where the tape was stopped at it; `sample` are the latents the pipeline has."""
        if k == len(self.parents.steps):
            return None
        recorded, answers = self.parents.steps[k], len(self.tape.answers)
        if sample.shape != recorded.x.shape or not torch.equal(recorded.x.to(sample.dtype), sample):
            raise ReplayError(f"the pipeline did not reach the recorded latents at step {k}: it cannot be branched")
        if answers != recorded.num_answers:
            raise ReplayError(
                f"the pipeline had {answers} outputs at step {k}, {recorded.num_answers} in the recording: it "
                "samples noise once per sample and can only be branched in whole batches"
            )
        return recorded

    def _is_live(self) -> bool:
        return len(self.tape.steps) > self.fork
