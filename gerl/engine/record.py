"""Record: the pipeline's own `__call__`, with its scheduler steps sampled and written on a tape."""

from __future__ import annotations  # of diffusers, which the driver of a run does without

import contextlib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from gerl.engine.batching import batch_size, detached_copy, materialised, num_elements, select_call, shapes
from gerl.engine.caches import Caches
from gerl.engine.feature_cache import NO_CACHE, CachedDenoisers, FeatureCache
from gerl.engine.instrument import StopPipeline, Timestep, routed
from gerl.engine.kernels import gaussian_log_prob
from gerl.engine.solver import ONE_STEP, OdeSolver, Span, compressed_spans
from gerl.engine.tape import Answer, CompanionStep, ComponentCall, Tape, TapeStep
from gerl.engine.transitions import Sampler, Transitions
from gerl.errors import ModelError

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline, SchedulerMixin
    from diffusers.utils import BaseOutput

# component outputs larger than this many times the latents (ControlNet residuals) are kept as shapes only
MAX_KEPT_OUTPUT = 16


def record(
    pipe: DiffusionPipeline,
    call: Mapping[str, object],
    kernel: str = "flow_sde",
    noise_level: float = 0.7,
    window: Iterable[int] | None = None,
    generators: Sequence[torch.Generator] | None = None,
    probe: Tape | bool = True,
    *,
    init_generators: Sequence[torch.Generator] | None = None,
    init_spread: float = 0.0,
    solver: str = "euler",
    compression: float = 1.0,
    stop: int | None = None,
    noise_at: Mapping[int, float] | None = None,
    cache: FeatureCache = NO_CACHE,
) -> tuple[BaseOutput | None, Tape]:
    """Run `pipe(**call)` without gradient; return its output and the tape that `replay` needs.

    `call`: keyword arguments of the pipeline with one prompt per sample: a list, or a string for a pipeline that takes
    one prompt a call. `kernel`, `noise_level`: the
    transition kernel of the stochastic steps, see `kernels.coefficients`; `window`: their indices, None: all but the
    last. `solver`: how the other steps are taken, see `solver.OdeSolver`; `compression`: which part of those after the
    window is taken at all, see `solver.compressed_spans` (an empty window compresses nothing).

    `generators`: one `torch.Generator` per sample, from which its initial latents and then its step noise are drawn;
    None: the global generator. `init_generators`: others for the initial latents, and whatever else the pipeline draws;
    equal seeds make equal latents. `init_spread` s in [0, 1]: with what `generators` draw mixed in, as sqrt(1 - s^2) of
    the one and s of the other, which is as normal.

    `probe`: True makes the one-sample tape needed to replay sub-batches, a tape reuses that of an earlier call of the
    same kind, False goes without.

    `stop`: leave the pipeline where it is about to take this step: the tape ends before it, but has what the denoiser
    said there, so that `branch` can go on from it; it keeps the denoiser's outputs however large (those of FLUX Kontext
    have the reference picture's tokens). The output is None. `noise_at`: noise levels of single stochastic steps, where
    it is not `noise_level`. `cache`: of the denoisers, at all steps but the stochastic ones, `stop` and
    those that it leaves out.

    Raises `ModelError` where the scheduler has no transition kernel, the solver or the cache is not for the pipeline,
    or `window` or `stop` name a step that cannot be, and with `init_spread` where the pipeline draws no noise that can
    be mixed.
    """
    check_single(pipe)
    n = batch_size(call)
    arguments = {name: value for name, value in call.items() if name != "generator"}
    tape = Tape(select_call(arguments, range(n)), n)
    sampler = Sampler(kernel, noise_level, solver, compression, cache)
    recorder = Recorder(tape, sampler, window, check_generators(generators, n), stop, noise_at)
    recorder.init_spread = init_spread
    # fresh lists both times: some pipelines write into theirs
    arguments = select_call(arguments, range(n))
    output = recorder.run(pipe, arguments, check_generators(init_generators, n) or generators)
    if isinstance(probe, Tape):
        tape.probe = probe
    elif probe and n > 1:
        tape.probe = record_probe(pipe, tape.call)
    return output, tape


def record_probe(pipe: DiffusionPipeline, call: Mapping[str, object], index: Sequence[int] = (0,)) -> Tape:
    """The tape of `call` for its first sample up to the first scheduler step: shapes, which show batch dimensions.

    `index`: for these samples instead.
    """
    tape = Tape(select_call(call, index), len(index))
    arguments = select_call(call, index)
    if "generator" in inspect.signature(type(pipe).__call__).parameters:
        arguments["generator"] = torch.Generator().manual_seed(0)  # leaves the global generator as it is
    Recorder(tape, Sampler("ode", 0.0), (), None, stop=0).run(pipe, arguments, None)
    return tape.start()


def record_structure(
    pipe: DiffusionPipeline,
    tape: Tape,
    index: Sequence[int],
    changed: Mapping[str, object],
    steps: int | None = None,
) -> Tape:
    """The tape of the call of `tape` for its samples `index` with other arguments, `changed`, such as another guidance.

    It is for replays at given latents: it has what the pipeline prepares and which components it calls with what
    shapes, but no trajectory. The denoiser runs only where a step calls it otherwise than the step before: mostly once.
    `steps`: how many of its steps, None: as many as `tape` has.
    Raises what the pipeline raises for the arguments, and `ModelError` where it takes fewer steps than those of `tape`.
    """
    call, n = {**select_call(tape.call, index), **changed}, len(index)
    found = Tape(call, n)
    recorder = Recorder(found, Sampler("ode", 0.0), (), None)
    recorder.structure = len(tape.steps) if steps is None else steps
    given = [torch.Generator().manual_seed(0) for _ in range(n)]  # leaves the global generator as it is
    recorder.run(pipe, select_call(call, range(n)), given)
    return found


def check_single(pipe: DiffusionPipeline) -> None:
    """Raise `ModelError` for a pipeline that calls others, whose steps take place in them."""
    from diffusers import DiffusionPipeline  # in here: the driver of a run does without diffusers

    if inner := [name for name, part in vars(pipe).items() if isinstance(part, DiffusionPipeline)]:
        raise ModelError(
            f"{type(pipe).__name__} consists of the pipelines {', '.join(inner)}: train one of these, such as "
            f"pipe.{inner[0]}"
        )


def check_generators(generators: Sequence[torch.Generator] | None, n: int) -> Sequence[torch.Generator] | None:
    """`generators`, if there is one for each of `n` samples; raises `ValueError` otherwise."""
    if generators is not None and len(generators) != n:
        raise ValueError(f"{len(generators)} generators for {n} samples: expected one per sample")
    return generators


class Recorder:
    """The head of a rollout: see `instrument.Head`."""

    def __init__(
        self,
        tape: Tape,
        sampler: Sampler,
        window: Iterable[int] | None,
        generators: Sequence[torch.Generator] | None,
        stop: int | None = None,
        noise_at: Mapping[int, float] | None = None,
    ) -> None:
        self.tape, self.sampler, self.generators, self.stop = tape, sampler, generators, stop
        self.window = None if window is None else frozenset(window)
        self.transitions, self.solver = Transitions(sampler), OdeSolver(sampler.solver)
        levels = (noise_at or {}).items()
        self.transitions_at = {k: Transitions(replace(sampler, noise_level=level)) for k, level in levels}
        self.caches = Caches()
        self.cached: CachedDenoisers
        self.depth = 0  # nesting of answered methods: only the outermost is answered in a replay
        self.carried: dict[int, torch.Tensor] = {}  # scheduler -> fp32 latents before rounding to the pipeline's dtype
        self.spans: dict[int, Span] = {}  # of the steps that compression changes
        self.expected: int | None = None  # number of steps that the spans rely on
        self.structure: int | None = None  # number of steps of which only the structure is recorded
        self.init_spread = 0.0  # how much of `generators` is mixed into what the pipeline draws
        self.mixed = False  # whether it was

    def run(
        self, pipe: DiffusionPipeline, arguments: dict[str, object], generators: Sequence[torch.Generator] | None
    ) -> BaseOutput | None:
        """The output of `pipe(**arguments)`, None where it was stopped."""
        if generators is not None:
            one = isinstance(arguments.get("prompt"), str)  # what takes no list of prompts takes none of generators
            arguments = {**arguments, "generator": generators[0] if one else list(generators)}
        self.caches.belong_to(pipe)
        self.cached = CachedDenoisers(pipe, self.sampler.cache)
        with self.cached, torch.no_grad(), routed(pipe, self), contextlib.suppress(StopPipeline):
            output = pipe(**arguments)
            self._finish()
            return output
        return None

    def on_method(self, name: str, method: Callable[..., object], *args: object, **kwargs: object) -> object:
        self.depth += 1
        try:
            value = method(*args, **kwargs)
            if name == "randn_tensor" and self.init_spread > 0:
                value = self._spread(value, method, *args, **kwargs)
        finally:
            self.depth -= 1
        if self.depth == 0:
            # a copy, since pipelines write into what they got: masked embeddings, latents scaled in place
            self.tape.answers.append(Answer(name, detached_copy(value)))
        return value

    def _spread(self, common: object, draw: Callable[..., object], *args: object, **kwargs: object) -> object:
        """`common`, what the pipeline drew by `draw` from the generators that it was given, and some from its own."""
        bound = inspect.signature(draw).bind(*args, **kwargs).arguments
        given = bound.get("generator")
        if given is None or self.generators is None:
            return common
        own = draw(**bound | {"generator": list(self.generators) if isinstance(given, list) else self.generators[0]})
        assert torch.is_tensor(common) and torch.is_tensor(own)
        self.mixed = True
        return math.sqrt(1 - self.init_spread**2) * common + self.init_spread * own

    def on_component(self, name: str, forward: Callable[..., object], *args: object, **kwargs: object) -> object:
        if self.depth:  # a replay answers the method around it, and never comes here
            return forward(*args, **kwargs)
        k = len(self.tape.steps)
        earlier = self._same_call_before(name) if self._is_skipped(k) else None
        if earlier is not None:  # the step does not use it: what was said last has the right shape
            self.tape.component_calls.append(ComponentCall(k, name, earlier.output, earlier.inputs))
            return materialised(detached_copy(earlier.output), self.tape.steps[-1].x.device)
        held = self.caches.check_arguments(k, name, (args, kwargs))
        exact = self.window is None or k in self.window or k == self.stop or k in self.sampler.cache.exact
        output = self.cached.run(name, self._calls_before(k, name), exact, forward, *args, **kwargs)
        self.caches.note(k, (args, kwargs), held, output)
        self.tape.component_calls.append(ComponentCall(k, name, detached_copy(output), shapes((args, kwargs))))
        return output

    def on_scheduler_step(
        self, scheduler: SchedulerMixin, model_output: torch.Tensor, timestep: Timestep, sample: torch.Tensor
    ) -> torch.Tensor:
        k = len(self.tape.steps)
        self._arrive(k, scheduler, timestep, sample)
        x = self._carried_to(scheduler, sample)
        before = self.carried.get(id(scheduler), x)
        edited = before is not x and before.shape == x.shape
        written = before.to(sample.dtype) != sample if edited else None
        stochastic = None if self.window is None else k in self.window
        transitions = self.transitions_at.get(k, self.transitions)
        rule = transitions.next_rule(scheduler, timestep, stochastic, self.spans.get(k, ONE_STEP))
        mean, log_prob = None, None
        if rule.std > 0:
            mean = rule.mean(x, model_output)
            x_next = mean + rule.std * self._noise(x)
            log_prob = gaussian_log_prob(x_next, mean, rule.std)
            self.solver.observe(scheduler, rule, x, model_output)
        else:
            x_next = x if self._is_skipped(k) else self.solver.step(scheduler, rule, x, model_output)
        self.tape.steps.append(TapeStep(rule, x, x_next, log_prob, mean, len(self.tape.answers), written))
        if written is not None:
            self._leave_out_overwritten(k - 1)
        self.carried[id(scheduler)] = x_next
        if len(self.tape.steps) == self.structure:
            raise StopPipeline
        return x_next

    def _leave_out_overwritten(self, k: int) -> None:
        """Average the log-probability of step `k` over those latents that reach the images."""
        step, overwritten = self.tape.steps[k], self.tape.overwritten(k)
        if step.log_prob is not None and step.mean is not None and overwritten is not None:
            log_prob = gaussian_log_prob(step.x_next, step.mean, step.rule.std, overwritten)
            self.tape.steps[k] = replace(step, log_prob=log_prob)

    def on_companion_step(
        self, scheduler: SchedulerMixin, model_output: torch.Tensor, timestep: Timestep, sample: torch.Tensor
    ) -> torch.Tensor:
        taken = len(self.tape.steps)
        x, span = self._carried_to(scheduler, sample), self.spans.get(taken - 1, ONE_STEP)
        rule = self.transitions.next_rule(scheduler, timestep, False, span)
        x_next = x if span[0] > 0 else self.solver.step(scheduler, rule, x, model_output)
        self.tape.companions.append(CompanionStep(taken, x, x_next))
        self.carried[id(scheduler)] = x_next
        return x_next

    def _carried_to(self, scheduler: SchedulerMixin, sample: torch.Tensor) -> torch.Tensor:
        """The latents of `scheduler`, which the pipeline has as `sample`, before they were rounded to its dtype."""
        x = self.carried.get(id(scheduler))
        if x is None or x.shape != sample.shape or not torch.equal(x.to(sample.dtype), sample):
            return sample.float().clone()  # the first step, or the pipeline edited the latents in between
        return x

    def _check_mixed(self) -> None:
        if self.init_spread > 0 and not self.mixed:
            raise ModelError(
                "the pipeline samples its noise in its own way, which cannot be mixed: sampling.init_noise_spread "
                "must be 0"
            )

    def _arrive(self, k: int, scheduler: SchedulerMixin, timestep: Timestep, sample: torch.Tensor) -> None:
        """Prepare for step `k`, whoever takes it: drop large outputs, plan the compression, stop where asked to."""
        self._check_mixed()
        self._drop_large_outputs(k, MAX_KEPT_OUTPUT * sample.numel())
        if self.sampler.compression < 1 and k == 0:
            self._compress(self.window, self.transitions.num_steps(scheduler, timestep))
        if k == self.stop:
            if self._is_skipped(k):
                raise ModelError(f"compression skips step {k}: stop at a step that is taken")
            raise StopPipeline

    def _compress(self, window: frozenset[int] | None, total: int) -> None:
        if window:  # after "all but the last" only one step is left
            self.spans = compressed_spans(max(window) + 1, total, self.sampler.compression)
            self.expected = total

    def _is_skipped(self, k: int) -> bool:
        """Whether step `k` leaves the latents as they are, for which no new output of the denoiser is needed."""
        return self.spans.get(k, ONE_STEP)[0] > 0 or (self.structure is not None and k > 0)

    def _same_call_before(self, name: str) -> ComponentCall | None:
        """The call at the last step that corresponds to the one `name` is about to make."""
        k = len(self.tape.steps)
        nth = self._calls_before(k, name)
        before = [c for c in self.tape.component_calls if (c.step, c.component) == (k - 1, name)]
        return before[nth] if nth < len(before) else None

    def _calls_before(self, step: int, name: str) -> int:
        """How often `step` has called the component `name` so far."""
        return sum((c.step, c.component) == (step, name) for c in self.tape.component_calls)

    def _finish(self) -> None:
        """The pipeline came to its end."""
        taken = len(self.tape.steps)
        if self.stop is not None:
            raise ModelError(f"the rollout should stop at step {self.stop}, but the pipeline took {taken} steps")
        if self.structure is not None:
            raise ModelError(f"the pipeline took {taken} steps, {self.structure} with other arguments")
        if self.window is not None and self.window - set(range(taken)):
            raise ModelError(f"the window contains steps {sorted(self.window)}, but the pipeline took {taken} steps")
        if self.expected not in (None, taken):
            raise ModelError(
                f"compression expected {self.expected} steps of one scheduler, but the pipeline took {taken}: set "
                "sampling.compression=1"
            )
        self._leave_out_overwritten(taken - 1)
        # what runs after the last step (VAE, safety checker) is not replayed
        self.tape.component_calls = [c for c in self.tape.component_calls if c.step < taken]

    def _noise(self, x: torch.Tensor) -> torch.Tensor:
        """Standard normal fp32 noise in the shape of `x`, sample by sample so that it does not depend on the batch."""
        if self.generators is None:
            return torch.randn(x.shape, device=x.device)
        rows, remainder = divmod(len(x), len(self.generators))
        if remainder:
            raise ModelError(
                f"the latents have {len(x)} rows for {len(self.generators)} samples: their noise cannot be assigned"
            )
        shape = (rows, *x.shape[1:])
        return torch.cat([torch.randn(shape, generator=g, device=g.device).to(x.device) for g in self.generators])

    def _drop_large_outputs(self, step: int, limit: int) -> None:
        calls = [c for c in self.tape.component_calls if c.step == step]
        # a rollout that is stopped is branched from, and a branch reads what the denoiser, called last, said
        kept = {c.component for c in calls[-1:]} if self.stop is not None else set()
        for call in calls:
            if call.component not in kept and num_elements(call.output) > limit:
                call.output = shapes(call.output)
