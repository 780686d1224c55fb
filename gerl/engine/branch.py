"""Branch: rollouts that share the beginning of a recorded one, for tree algorithms.

The pipeline's own `__call__` runs again. Before the branching step it is answered from the tape, as in a replay:
methods, components and scheduler steps give the recorded values of the parents, and nothing is computed. At the
branching step the pipeline forms its model output from what the denoiser said in the recording, and from there on it is
a rollout.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_any

from gerl.engine.batching import detached_copy, materialised, rows, select_call, take
from gerl.engine.record import Recorder, check_generators, record_probe
from gerl.engine.tape import Answer, ComponentCall, Tape, TapeStep
from gerl.engine.transitions import Sampler, advance
from gerl.errors import ModelError, ReplayError


def branch(
    pipe: Any,
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
) -> tuple[Any, Tape]:
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
    parents = Parents(tape, step, index)
    window = None if window is None else frozenset(window)
    if min(window or (), default=step) < step or (stop is not None and stop < step):
        raise ModelError(f"a branch at step {step} has no window {sorted(window or ())} and no stop {stop} before it")
    if parents.unprobed:
        tape.probe = record_probe(pipe, tape.call, [0] if tape.batch_size > 1 else [0, 0])
    check_generators(generators, len(index))
    child = Tape(select_call(tape.call, index), len(index), probe=parents.one_sample())
    sampler = Sampler(kernel, noise_level, solver, compression)
    recorder = BranchRecorder(parents, child, sampler, window, generators, stop)
    return recorder.run(pipe, select_call(tape.call, index), generators), child


class Parents:
    """The samples `index` of a tape, up to the denoiser's output at step `fork`."""

    def __init__(self, tape: Tape, fork: int, index: Sequence[int]) -> None:
        self.tape, self.fork, self.index = tape, fork, tuple(index)
        n, calls = tape.batch_size, tape.component_calls
        if not self.index or set(self.index) - set(range(n)):
            raise ReplayError(f"samples {list(index)} cannot be branched: the tape has {n} samples")
        if not 0 <= fork < len(tape.steps) + any(c.step == len(tape.steps) for c in calls):
            raise ReplayError(f"step {fork} cannot be branched at: the tape has {len(tape.steps)} steps")
        if fork < len(tape.steps) and tape.steps[fork].rule.dt == 0:
            raise ReplayError(f"step {fork} cannot be branched at: compression left it out")
        self.whole = self.index == tuple(range(n))
        self.looped = {c.component for c in calls if c.step > 0}
        self.denoisers = set({c.step: c.component for c in calls if c.step <= fork}.values())  # the last of each step

    @property
    def device(self) -> torch.device | None:
        """Where the latents are, None before the first step."""
        return self.tape.steps[0].x.device if self.tape.steps else None

    @property
    def unprobed(self) -> bool:
        """Whether a probe is missing that shows where batch dimensions are."""
        return not self.whole and (self.tape.probe is None or self.tape.probe.batch_size == self.tape.batch_size)

    def one_sample(self) -> Tape | None:
        """The probe for the children: a tape of one sample, up to the first step."""
        tape = self.tape
        if tape.batch_size > 1:
            return tape.probe
        answers = tape.answers[: tape.steps[0].num_answers] if tape.steps else tape.answers
        first = [c for c in tape.component_calls if c.step == 0]
        return Tape(tape.call, 1, answers=answers, component_calls=first)

    def answer(self, position: int, name: str) -> Any:
        """What the parents' method `name`, the `position`-th that was called, returned."""
        if position >= len(self.tape.answers) or self.tape.answers[position].method != name:
            raise ReplayError(f"the branch calls {name}, which the recording did not call at this point")
        probe = self.tape.probe.answers if self.tape.probe else []
        alike = probe[position : position + 1] or [a for a in probe if a.method == name]
        return self._samples(self.tape.answers[position].value, alike[-1].value if alike else None)

    def output(self, position: int, step: int, name: str) -> Any | None:
        """What the component `name`, the `position`-th that was called, returned; None where it has to run again.

        Of large outputs only the shape was kept. It serves for a ControlNet, say, whose only reader is the denoiser,
        which does not run, but not for what was called once before the loop, nor for the denoiser itself.
        """
        calls = self.tape.component_calls
        recorded = calls[position] if position < len(calls) else None
        if recorded is None or (recorded.component, recorded.step) != (name, step):
            raise ReplayError(f"the branch calls {name} at step {step}, which the recording did not do")
        if tree_any(lambda v: torch.is_tensor(v) and v.is_meta, recorded.output):
            if name in self.denoisers:
                raise ReplayError(f"the output of {name} is too large for the tape, and cannot be branched from")
            if name not in self.looped:
                return None
        nth = sum((c.component, c.step) == (name, step) for c in calls[:position])
        probe = self.tape.probe.component_calls if self.tape.probe else []
        alike = [c for c in probe if c.component == name] or probe[-1:]
        return self._samples(recorded.output, alike[min(nth, len(alike) - 1)].output if alike else None)

    def step(self, k: int, num_answers: int, sample: torch.Tensor) -> TapeStep | None:
        """The parents' step `k`, None where the tape was stopped at it; `sample` are the latents the pipeline has."""
        if k == len(self.tape.steps):
            return None
        recorded = self.tape.steps[k]
        x, x_next = self._rows(recorded.x), self._rows(recorded.x_next)
        if sample.shape != x.shape or not torch.equal(x.to(sample.dtype), sample):
            raise ReplayError(f"the pipeline did not arrive at the recorded latents at step {k}: it cannot be branched")
        if num_answers != recorded.num_answers:
            raise ReplayError(
                f"the pipeline had {num_answers} answers at step {k}, {recorded.num_answers} in the recording: it "
                "draws noise once per sample and can only be branched in whole batches"
            )
        log_prob = None if recorded.log_prob is None else self._rows(recorded.log_prob)
        mean = None if recorded.mean is None else self._rows(recorded.mean)
        return TapeStep(recorded.rule, x, x_next, log_prob, mean, num_answers)

    def _rows(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.whole else rows(tensor, self.index, self.tape.batch_size)

    def _samples(self, full: Any, probed: Any) -> Any:
        if self.whole or self.tape.probe is None:
            return detached_copy(full)
        return take(full, probed, self.index, self.tape.batch_size, self.tape.probe.batch_size)


class BranchRecorder(Recorder):
    """The head of a branch: the parents' answers, then a rollout. See `instrument.Head`."""

    def __init__(
        self,
        parents: Parents,
        tape: Tape,
        sampler: Sampler,
        window: Iterable[int] | None,
        generators: Sequence[torch.Generator] | None,
        stop: int | None,
    ) -> None:
        super().__init__(tape, sampler, window, generators, stop)
        self.parents = parents

    def on_method(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.depth or self._is_live():
            return super().on_method(name, method, *args, **kwargs)
        value = self.parents.answer(len(self.tape.answers), name)
        self.tape.answers.append(Answer(name, value))
        return detached_copy(value)

    def on_component(self, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.depth or self._is_live():
            return super().on_component(name, forward, *args, **kwargs)
        k = len(self.tape.steps)
        output = self.parents.output(len(self.tape.component_calls), k, name)
        if output is None:
            return super().on_component(name, forward, *args, **kwargs)
        self.tape.component_calls.append(ComponentCall(k, name, output))
        return materialised(detached_copy(output), self.parents.device)

    def on_scheduler_step(
        self, scheduler: Any, model_output: torch.Tensor, timestep: Any, sample: torch.Tensor
    ) -> torch.Tensor:
        k = len(self.tape.steps)
        step = None if self._is_live() else self.parents.step(k, len(self.tape.answers), sample)
        if step is None or k == self.parents.fork:
            return super().on_scheduler_step(scheduler, model_output, timestep, sample)
        self._arrive(k, scheduler, timestep, sample)
        advance(scheduler, timestep)
        self.solver.observe(scheduler, step.rule, step.x, model_output)
        self.tape.steps.append(step)
        self.carried[id(scheduler)] = step.x_next
        return step.x_next

    def _is_live(self) -> bool:
        return len(self.tape.steps) > self.parents.fork
