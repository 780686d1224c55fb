"""Recording: the pipeline's own `__call__`, with its scheduler steps sampled and recorded on a tape."""

from __future__ import annotations  # annotations name diffusers classes, which the driver of a run does not import

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from gerl.engine.feature_cache import NO_CACHE, CachedDenoisers, FeatureCache
from gerl.engine.hooks import RolloutHead, StopPipeline, routed, uncounted
from gerl.engine.kv_caches import Caches
from gerl.engine.rows import detached_copy, materialised, select_call, shapes
from gerl.engine.skipping import Compression, Skipping, StructureOnly
from gerl.engine.tape import Answer, SecondaryStep, Tape, TapeStep
from gerl.engine.transitions import SOLVERS, Timestep, Transitions, differs, gaussian_log_prob
from gerl.errors import ModelError

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline, SchedulerMixin
    from diffusers.utils import BaseOutput

    from gerl.engine.hidden_states import HiddenStates

# larger component outputs (ControlNet residuals), relative to the latents, are kept as shapes only
MAX_KEPT_OUTPUT = 16


@dataclass(frozen=True)
class SamplingPlan:
    """How a rollout takes its denoising steps; the fields are explained in `record`.

    Example: `SamplingPlan("flow_sde", 0.7, window=frozenset({1, 2}))` adds noise at steps 1 and 2 of the schedule and
    takes the scheduler's own Euler steps elsewhere.
    """

    kernel: str
    noise_level: float
    solver: str = "euler"
    compression: float = 1.0
    cache: FeatureCache = NO_CACHE
    window: frozenset[int] | None = None  # stochastic steps; None: all but the last
    stop: int | None = None  # leave the pipeline before this step
    noise_at: Mapping[int, float] = field(default_factory=dict)  # noise levels of individual steps
    observer: HiddenStates | None = None  # records features for a critic


DETERMINISTIC = SamplingPlan("ode", 0.0, window=frozenset())


@dataclass(frozen=True)
class InitialNoise:
    """Generators of the initial latents, and the share of the step generators' noise mixed into them."""

    generators: Sequence[torch.Generator] | None = None
    spread: float = 0.0


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
    one prompt per call. `kernel`, `noise_level`: the transition kernel of the stochastic steps, see
    `transitions.coefficients`; `window`: their indices, None: all but the last; `noise_at`: noise levels of individual
    steps. `solver`: how the other steps are taken, see `transitions.OdeSolver`; `compression`: the fraction of steps
    after the window that are taken, see `compressed_spans` (no effect with an empty window); `cache`: feature cache of
    the denoisers at deterministic steps.

    `generators`: one `torch.Generator` per sample, for its initial latents and then its step noise; None: the global
    generator. `init_generators`: separate ones for the initial latents and anything else the pipeline samples; equal
    seeds give equal latents. `init_spread` s in [0, 1]: mixes in noise of `generators`, weighted sqrt(1 - s^2) to s, so
    that the sum is again standard normal.

    `probe`: True records the one-sample tape needed to replay sub-batches, a tape reuses that of an earlier call of the
    same kind, False skips it. `stop`: leave the pipeline before this step; the tape then ends there but keeps the
    denoiser's output at it, however large, so that `branch` can continue, and the returned output is None.

    Raises `ModelError` if the scheduler has no transition kernel, the solver or the cache does not support the
    pipeline, `window` or `stop` name a step that is not taken, or the pipeline's noise cannot be mixed.
    """
    plan = checked_plan(kernel, noise_level, solver, compression, cache, window, stop, noise_at)
    return record_plan(pipe, call, plan, generators, probe, InitialNoise(init_generators, init_spread))


def checked_plan(
    kernel: str, noise_level: float, solver: str, compression: float, cache: FeatureCache, window: Iterable[int] | None,
    stop: int | None, noise_at: Mapping[int, float] | None,
) -> SamplingPlan:  # fmt: skip
    if solver not in SOLVERS:
        raise ValueError(f"unknown solver {solver!r}: choose one of {', '.join(SOLVERS)}")
    if not 0 < compression <= 1:
        raise ValueError(f"compression must be above 0 and at most 1, got {compression}")
    stochastic = None if window is None else frozenset(window)
    return SamplingPlan(kernel, noise_level, solver, compression, cache, stochastic, stop, noise_at or {})


def record_plan(
    pipe: DiffusionPipeline,
    call: Mapping[str, object],
    plan: SamplingPlan,
    generators: Sequence[torch.Generator] | None = None,
    probe: Tape | bool = True,
    initial: InitialNoise = InitialNoise(),
) -> tuple[BaseOutput | None, Tape]:
    """Record with a `SamplingPlan`; see `record`."""
    check_single(pipe)
    tape = Tape.of(call)
    n = tape.batch_size
    recorder = Recorder(tape, plan, check_generators(generators, n), initial.spread)
    output = recorder.run(pipe, check_generators(initial.generators, n) or generators)
    if isinstance(probe, Tape):
        tape.probe = probe
    elif probe and n > 1:
        tape.probe = record_batch_probe(pipe, tape.call)
    return output, tape


def record_batch_probe(pipe: DiffusionPipeline, call: Mapping[str, object], index: Sequence[int] = (0,)) -> Tape:
    """Record `call` for its samples `index` up to the first step, as shapes that reveal batch dimensions."""
    tape = Tape.of(call, index)
    takes_generator = "generator" in inspect.signature(type(pipe).__call__).parameters
    generator = fixed_generators(1)[0] if takes_generator else None
    with uncounted(pipe):
        Recorder(tape, replace(DETERMINISTIC, stop=0), None).run(pipe, generator)
    return tape.start()


def record_structure(
    pipe: DiffusionPipeline, tape: Tape, index: Sequence[int], changed: Mapping[str, object], steps: int | None = None
) -> Tape:
    """Record the call of `tape` for its samples `index` with `changed` arguments, such as another guidance.

    The result is for replays at given latents: it has the values that the pipeline prepares and the shapes of its
    component calls, but no trajectory. The denoiser runs only at steps whose calls differ from the previous step's,
    mostly once. `steps`: number of steps to record, None: as many as `tape` has. Raises the pipeline's errors for the
    arguments, and `ModelError` if it takes fewer steps than that.
    """
    rows_tape = Tape({**select_call(tape.call, index), **changed}, len(index))
    recorder = Recorder(rows_tape, DETERMINISTIC, None)
    recorder.skipping = StructureOnly(len(tape.steps) if steps is None else steps)
    with uncounted(pipe):
        recorder.run(pipe, fixed_generators(len(index)))
    return rows_tape


def fixed_generators(n: int) -> list[torch.Generator]:
    """Return generators with seed 0, for calls whose noise does not matter, which leave the global one unchanged."""
    return [torch.Generator().manual_seed(0) for _ in range(n)]


def check_single(pipe: DiffusionPipeline) -> None:
    """Raise `ModelError` for a pipeline that consists of pipelines and takes its steps in them."""
    from diffusers import DiffusionPipeline  # imported lazily: the driver of a run does not need it

    if inner := [name for name, part in vars(pipe).items() if isinstance(part, DiffusionPipeline)]:
        raise ModelError(
            f"{type(pipe).__name__} consists of the pipelines {', '.join(inner)}: train one of these, such as "
            f"pipe.{inner[0]}"
        )


def check_generators(generators: Sequence[torch.Generator] | None, n: int) -> Sequence[torch.Generator] | None:
    """Return `generators`; raise `ValueError` unless there is one per sample."""
    if generators is not None and len(generators) != n:
        raise ValueError(f"{len(generators)} generators for {n} samples: expected one per sample")
    return generators


class Recorder(RolloutHead):
    """Head of a rollout or a branch, which receives the routed calls."""

    def __init__(
        self, tape: Tape, plan: SamplingPlan, generators: Sequence[torch.Generator] | None, init_spread: float = 0.0
    ) -> None:
        """Initialise for one call; `init_spread`: share of `generators` in the noise that the pipeline samples."""
        super().__init__()
        self.tape, self.plan, self.generators, self.init_spread = tape, plan, generators, init_spread
        self.window, self.stop = plan.window, plan.stop
        self.transitions = Transitions(plan.kernel, plan.noise_level, plan.solver)
        self.skipping = Skipping()
        if plan.compression < 1 and plan.window:  # after a window of "all but the last" only one step is left
            self.skipping = Compression(plan.window, plan.compression)
        self.caches = Caches()
        self.cached: CachedDenoisers | None = None
        self.depth = 0  # nesting of answered methods: a replay answers only the outermost
        self.carried: dict[int, torch.Tensor] = {}  # scheduler -> fp32 latents after its last step
        self.mixed = False  # whether initial noise was mixed

    def run(
        self, pipe: DiffusionPipeline, generators: Sequence[torch.Generator] | torch.Generator | None
    ) -> BaseOutput | None:
        """Run the call of the tape; return the pipeline's output, None if it was stopped."""
        arguments = self.tape.fresh_call()
        if isinstance(generators, torch.Generator):
            arguments["generator"] = generators
        elif generators is not None:
            one = isinstance(arguments.get("prompt"), str)  # no list of prompts, no list of generators
            arguments["generator"] = generators[0] if one else list(generators)
        self.caches.belong_to(pipe)
        cached: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if self.plan.cache.name != "none":
            cached = self.cached = CachedDenoisers(pipe, self.plan.cache)
        observer = self.plan.observer
        observed = contextlib.nullcontext() if observer is None else observer.recorded_on(self.tape)
        output: BaseOutput | None = None
        with cached, observed, torch.no_grad(), routed(pipe, self), contextlib.suppress(StopPipeline):
            output = pipe(**arguments)
            self._finish()
        self.resolve()
        return output

    def on_method(self, name: str, method: Callable[..., object], *args: object, **kwargs: object) -> object:
        self.depth += 1
        try:
            value = method(*args, **kwargs)
            if name == "randn_tensor" and self.init_spread > 0:
                value = self._spread(value, method, *args, **kwargs)
        finally:
            self.depth -= 1
        if self.depth == 0:
            # a copy, since pipelines may modify the value: masked embeddings, latents scaled in place
            self.tape.answers.append(Answer(name, detached_copy(value)))
        return value

    def _spread(self, common: object, sampler: Callable[..., object], *args: object, **kwargs: object) -> object:
        """Mix `common`, sampled by the pipeline with `sampler`, with noise of the step generators."""
        bound = inspect.signature(sampler).bind(*args, **kwargs).arguments
        generator = bound.get("generator")
        if generator is None or self.generators is None:
            return common
        separate = sampler(
            **bound | {"generator": list(self.generators) if isinstance(generator, list) else self.generators[0]}
        )
        assert torch.is_tensor(common) and torch.is_tensor(separate)
        self.mixed = True
        return math.sqrt(1 - self.init_spread**2) * common + self.init_spread * separate

    def on_component(self, name: str, forward: Callable[..., object], *args: object, **kwargs: object) -> object:
        if self.depth:  # a replay answers the surrounding method and does not reach this call
            return forward(*args, **kwargs)
        k = len(self.tape.steps)
        held, reads = self.caches.arguments(k, (args, kwargs))
        earlier = self.skipping.answer(self.tape, name)
        if earlier is not None:  # the skipped step does not use it: the last output has the right shape
            self.tape.component_calls.append(replace(earlier, step=k, reads=reads))
            return materialised(detached_copy(earlier.output), self.tape.steps[-1].x.device)
        if self.cached is None:
            output = forward(*args, **kwargs)
        else:
            exact = self.window is None or k in self.window or k == self.stop or k in self.plan.cache.exact
            nth = sum((c.step, c.component) == (k, name) for c in self.tape.component_calls)
            output = self.cached.run(name, nth, exact, forward, *args, **kwargs)
        fills = self.caches.note(k, name, (args, kwargs), held, output)
        self.tape.add_call(name, output, (args, kwargs), reads, fills)
        return output

    def on_scheduler_step(
        self, scheduler: SchedulerMixin, model_output: torch.Tensor, timestep: Timestep, sample: torch.Tensor
    ) -> torch.Tensor:
        k = len(self.tape.steps)
        self._arrive(k, scheduler, timestep, sample)
        x, written = self._carried_to(scheduler, sample)
        rule, x_next, log_prob, mean = self.transitions.take(
            scheduler,
            timestep,
            x,
            model_output,
            None if self.window is None else k in self.window,
            self.skipping.span(k),
            self.skipping.skips(k),
            self.plan.noise_at.get(k),
            self.generators,
        )
        self.tape.steps.append(TapeStep(rule, x, x_next, log_prob, mean, len(self.tape.answers)))
        if written is not None:
            carried = self.carried[id(scheduler)]
            self.defer(written.any(), functools.partial(self._note_written, k, carried, written))
        self.carried[id(scheduler)] = x_next
        if len(self.tape.steps) == self.skipping.last:
            raise StopPipeline
        return x_next

    def _note_written(self, k: int, carried: torch.Tensor, written: torch.Tensor, was_written: bool) -> None:
        """Complete step `k`, before which the pipeline edited the `carried` latents, or which it left."""
        if not was_written:
            self.tape.steps[k] = replace(self.tape.steps[k], x=carried)  # as stored for the step before
            return
        if bool(self.tape.steps[k].x[written].isnan().any()):
            raise ModelError(
                f"before step {k} the pipeline's callback or condition turned latents into nan: check what it computes"
            )
        self.tape.steps[k] = replace(self.tape.steps[k], written=written)
        self._leave_out_overwritten(k - 1)

    def _leave_out_overwritten(self, k: int) -> None:
        """Average the log-probability of step `k` over the latents that reach the images."""
        step = self.tape.steps[k]
        if step.log_prob is None or step.mean is None:
            return
        if (overwritten := self.tape.overwritten(k)) is not None:
            log_prob = gaussian_log_prob(step.x_next, step.mean, step.rule.std, overwritten)
            self.tape.steps[k] = replace(step, log_prob=log_prob)

    def on_secondary_step(
        self, scheduler: SchedulerMixin, model_output: torch.Tensor, timestep: Timestep, sample: torch.Tensor
    ) -> torch.Tensor:
        taken = len(self.tape.steps)
        x, _ = self._carried_to(scheduler, sample)
        span = self.skipping.span(taken - 1)
        x_next = self.transitions.take(scheduler, timestep, x, model_output, False, span, span[0] > 0)[1]
        self.tape.companions.append(SecondaryStep(taken, x, x_next))
        self.carried[id(scheduler)] = x_next
        return x_next

    def _carried_to(self, scheduler: SchedulerMixin, sample: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the fp32 latents before they were rounded to `sample`, and where the pipeline may have edited them."""
        x = self.carried.get(id(scheduler))
        if x is None or x.shape != sample.shape:
            return sample.float().clone(), None  # first step
        if self.source_of(scheduler, sample) is x:
            return x, None
        written = differs(x.to(sample.dtype), sample)
        return torch.where(written, sample.float(), x), written

    def _arrive(self, k: int, scheduler: SchedulerMixin, timestep: Timestep, sample: torch.Tensor) -> None:
        """Prepare for step `k`: drop large outputs, start skipping, or stop."""
        if self.init_spread > 0 and not self.mixed:
            raise ModelError(
                "the pipeline samples its noise in its own way, which cannot be mixed: use sampling.init_noise_spread=0"
            )
        calls = [c for c in self.tape.component_calls if c.step == k]
        # stopped rollouts are branched from, which needs the output of the denoiser, the last component called
        last_component = {c.component for c in calls[-1:]} if self.stop is not None else set()
        for call in calls:
            if call.component not in last_component and call.elements > MAX_KEPT_OUTPUT * sample.numel():
                call.output = shapes(call.output)
        if k == 0:
            self.skipping.begin(lambda: self.transitions.num_steps(scheduler, timestep))
        if k == self.stop:
            if self.skipping.skips(k):
                raise ModelError(f"compression skips step {k}: stop at a step that is taken")
            raise StopPipeline

    def _finish(self) -> None:
        """Check and complete the tape at the end of the pipeline."""
        taken = len(self.tape.steps)
        if self.stop is not None:
            raise ModelError(f"the rollout should stop at step {self.stop}, but the pipeline took {taken} steps")
        if self.window is not None and self.window - set(range(taken)):
            raise ModelError(f"the window contains steps {sorted(self.window)}, but the pipeline took {taken} steps")
        self.skipping.finish(taken)
        self.resolve()
        self._leave_out_overwritten(taken - 1)
        # calls after the last step (VAE, safety checker) are not replayed
        self.tape.component_calls = [c for c in self.tape.component_calls if c.step < taken]
