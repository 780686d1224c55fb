"""Recording and branching: rollouts through the pipeline's own `__call__`, recorded on tapes."""

from __future__ import annotations  # annotations name diffusers classes, which the driver of a run does not import

import contextlib
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch.utils._pytree import tree_any, tree_leaves

from gerl.engine.feature_cache import NO_CACHE, CachedDenoisers, FeatureCache
from gerl.engine.hooks import StopPipeline, routed
from gerl.engine.tape import (
    Answer,
    ComponentCall,
    SecondaryStep,
    Tape,
    TapeStep,
    Tree,
    detached_copy,
    materialised,
    select_call,
    shapes,
)  # fmt: skip
from gerl.engine.transitions import ONE_STEP, SOLVERS, Span, Timestep, Transitions, advance, gaussian_log_prob
from gerl.errors import ModelError, ReplayError

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline, SchedulerMixin
    from diffusers.utils import BaseOutput


# --- Recording: the pipeline's own `__call__`, with its scheduler steps sampled and recorded on a tape

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
    plan = _checked_plan(kernel, noise_level, solver, compression, cache, window, stop, noise_at)
    return record_plan(pipe, call, plan, generators, probe, InitialNoise(init_generators, init_spread))


def _checked_plan(
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
    """Record `call` for its first sample up to the first scheduler step, as shapes that reveal batch dimensions.

    `index`: record these samples instead.
    """
    tape = Tape.of(call, index)
    takes_generator = "generator" in inspect.signature(type(pipe).__call__).parameters
    generator = fixed_generators(1)[0] if takes_generator else None
    Recorder(tape, replace(DETERMINISTIC, stop=0), None).run(pipe, generator)
    return tape.start()


def record_structure(
    pipe: DiffusionPipeline,
    tape: Tape,
    index: Sequence[int],
    changed: Mapping[str, object],
    steps: int | None = None,
) -> Tape:
    """Record the call of `tape` for its samples `index` with `changed` arguments, such as another guidance.

    The result is for replays at given latents: it has the values that the pipeline prepares and the shapes of its
    component calls, but no trajectory. The denoiser runs only at steps whose calls differ from the previous step's,
    mostly once. `steps`: number of steps to record, None: as many as `tape` has. Raises the pipeline's errors for the
    arguments, and `ModelError` if it takes fewer steps than that.
    """
    found = Tape({**select_call(tape.call, index), **changed}, len(index))
    recorder = Recorder(found, DETERMINISTIC, None)
    recorder.skipping = StructureOnly(len(tape.steps) if steps is None else steps)
    recorder.run(pipe, fixed_generators(len(index)))
    return found


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


class Recorder:
    """Head of a rollout, see `hooks.Head`."""

    def __init__(
        self, tape: Tape, plan: SamplingPlan, generators: Sequence[torch.Generator] | None, init_spread: float = 0.0
    ) -> None:
        """Initialise for one call; `init_spread`: share of `generators` in the noise that the pipeline samples."""
        self.tape, self.plan, self.generators, self.init_spread = tape, plan, generators, init_spread
        self.window, self.stop = plan.window, plan.stop
        self.transitions = Transitions(plan)
        self.skipping = Skipping()
        if plan.compression < 1 and plan.window:  # after a window of "all but the last" only one step is left
            self.skipping = Compression(plan.window, plan.compression)
        self.caches = Caches()
        self.cached: CachedDenoisers | None = None
        self.depth = 0  # nesting of answered methods: a replay answers only the outermost
        self.carried: dict[int, torch.Tensor] = {}  # scheduler -> fp32 latents before rounding to the pipeline's dtype
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
        with cached, torch.no_grad(), routed(pipe, self), contextlib.suppress(StopPipeline):
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
            # a copy, since pipelines may modify the value: masked embeddings, latents scaled in place
            self.tape.answers.append(Answer(name, detached_copy(value)))
        return value

    def _spread(self, common: object, draw: Callable[..., object], *args: object, **kwargs: object) -> object:
        """Mix `common`, sampled by the pipeline with `draw`, with noise of the step generators."""
        bound = inspect.signature(draw).bind(*args, **kwargs).arguments
        given = bound.get("generator")
        if given is None or self.generators is None:
            return common
        own = draw(**bound | {"generator": list(self.generators) if isinstance(given, list) else self.generators[0]})
        assert torch.is_tensor(common) and torch.is_tensor(own)
        self.mixed = True
        return math.sqrt(1 - self.init_spread**2) * common + self.init_spread * own

    def on_component(self, name: str, forward: Callable[..., object], *args: object, **kwargs: object) -> object:
        if self.depth:  # a replay answers the surrounding method and does not reach this call
            return forward(*args, **kwargs)
        k = len(self.tape.steps)
        earlier = self.skipping.answer(self.tape, name)
        if earlier is not None:  # the skipped step does not use it: the last output has the right shape
            self.tape.component_calls.append(ComponentCall(k, name, earlier.output, earlier.inputs))
            return materialised(detached_copy(earlier.output), self.tape.steps[-1].x.device)
        held = self.caches.check_arguments(k, name, (args, kwargs))
        if self.cached is None:
            output = forward(*args, **kwargs)
        else:
            exact = self.window is None or k in self.window or k == self.stop or k in self.plan.cache.exact
            nth = sum((c.step, c.component) == (k, name) for c in self.tape.component_calls)
            output = self.cached.run(name, nth, exact, forward, *args, **kwargs)
        self.caches.note(k, (args, kwargs), held, output)
        self.tape.add_call(name, output, (args, kwargs))
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
        self.tape.steps.append(TapeStep(rule, x, x_next, log_prob, mean, len(self.tape.answers), written))
        if written is not None:
            self._leave_out_overwritten(k - 1)
        self.carried[id(scheduler)] = x_next
        if len(self.tape.steps) == self.skipping.last:
            raise StopPipeline
        return x_next

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
        x = self._carried_to(scheduler, sample)
        span = self.skipping.span(taken - 1)
        x_next = self.transitions.take(scheduler, timestep, x, model_output, False, span, span[0] > 0)[1]
        self.tape.companions.append(SecondaryStep(taken, x, x_next))
        self.carried[id(scheduler)] = x_next
        return x_next

    def _carried_to(self, scheduler: SchedulerMixin, sample: torch.Tensor) -> torch.Tensor:
        """Return the fp32 latents of `scheduler` before they were rounded to the pipeline's dtype as `sample`."""
        x = self.carried.get(id(scheduler))
        if x is None or x.shape != sample.shape or not torch.equal(x.to(sample.dtype), sample):
            return sample.float().clone()  # first step, or the pipeline edited the latents in between
        return x

    def _arrive(self, k: int, scheduler: SchedulerMixin, timestep: Timestep, sample: torch.Tensor) -> None:
        """Prepare for step `k`: drop large outputs, start skipping, or stop."""
        if self.init_spread > 0 and not self.mixed:
            raise ModelError(
                "the pipeline samples its noise in its own way, which cannot be mixed: use sampling.init_noise_spread=0"
            )
        calls = [c for c in self.tape.component_calls if c.step == k]
        # stopped rollouts are branched from, which needs the output of the denoiser, the last component called
        kept = {c.component for c in calls[-1:]} if self.stop is not None else set()
        for call in calls:
            if call.component not in kept and call.elements > MAX_KEPT_OUTPUT * sample.numel():
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
        self._leave_out_overwritten(taken - 1)
        # calls after the last step (VAE, safety checker) are not replayed
        self.tape.component_calls = [c for c in self.tape.component_calls if c.step < taken]


# --- Rollouts that skip denoising steps: compression (MixGRPO-Flash), and recordings of a call's structure.
#
# A skipped step leaves the latents unchanged and does not use the denoiser's output: the call is answered with the
# previous step's output, which has the right shape.


class Skipping:
    """Policy for skipping steps; this base class skips none."""

    last: int | None = None  # leave the pipeline after this number of steps

    def begin(self, count_steps: Callable[[], int]) -> None:
        """Initialise before the pipeline's first step."""

    def span(self, step: int) -> Span:
        """Return start and end of step `step`, in scheduler steps relative to it."""
        return ONE_STEP

    def skips(self, step: int) -> bool:
        """Whether step `step` leaves the latents unchanged."""
        return False

    def answer(self, tape: Tape, name: str) -> ComponentCall | None:
        """Return the call of the last step on `tape` that answers the next one of `name`; None: it has to run."""
        k = len(tape.steps)
        if not self.skips(k):
            return None
        nth = sum((c.step, c.component) == (k, name) for c in tape.component_calls)
        before = [c for c in tape.component_calls if (c.step, c.component) == (k - 1, name)]
        return before[nth] if nth < len(before) else None

    def finish(self, taken: int) -> None:
        """Raise `ModelError` if the pipeline has not taken the expected number of steps."""


class Compression(Skipping):
    """Compression of the steps after the window: fewer and longer steps (MixGRPO-Flash, arXiv 2507.21802)."""

    def __init__(self, window: frozenset[int], share: float) -> None:
        self.window, self.share = window, share
        self.spans: dict[int, Span] = {}
        self.expected: int | None = None  # number of steps assumed by the spans

    def begin(self, count_steps: Callable[[], int]) -> None:
        self.expected = count_steps()
        self.spans = compressed_spans(max(self.window) + 1, self.expected, self.share)

    def span(self, step: int) -> Span:
        return self.spans.get(step, ONE_STEP)

    def skips(self, step: int) -> bool:
        return self.span(step)[0] > 0

    def finish(self, taken: int) -> None:
        if self.expected not in (None, taken):
            raise ModelError(
                f"compression expected {self.expected} steps of one scheduler, but the pipeline took {taken}: set "
                "sampling.compression=1"
            )


class StructureOnly(Skipping):
    """Skipping of all steps but the first, which leaves the pipeline after `last` steps."""

    def __init__(self, last: int) -> None:
        self.last = last

    def skips(self, step: int) -> bool:
        return step > 0

    def finish(self, taken: int) -> None:
        raise ModelError(f"the pipeline took {taken} steps, {self.last} with other arguments")


def compressed_spans(first: int, total: int, compression: float) -> dict[int, Span]:
    """Return the spans of the steps `first` to `total - 1` if only `ceil(compression * m)` of these m are taken.

    The steps taken are spread evenly, starting with `first`, and each goes up to the start of the next, the last to the
    end. The others have length 0, at the sigma reached by the one before them (MixGRPO-Flash, arXiv 2507.21802).
    """
    m = total - first
    taken = max(math.ceil(compression * m - 1e-9), 1)  # 0.55 * 100 is 55.00000000000001
    starts = [first + round(j * m / taken) for j in range(taken + 1)]
    return {
        k: (0 if k == here else following - k, following - k)
        for here, following in pairwise(starts)
        for k in range(here, following)
    }


# --- Caches filled in one denoising step and read in a later one (KV caches), which cannot be replayed.
#
# A replay runs the denoiser at trained steps only, so anything left by an untrained step would be missing, and the
# graph of one step would reach into another. An object that has tensors inside, but is not a container, may be a cache.

HOOKS = "_diffusers_hook"  # the attribute in which diffusers keeps a module's hooks
DEPTH = 4  # levels of attributes, lists and dictionaries inside a cache: layers, their parts, keys and values


class Caches:
    """Detector of objects that carry state from one denoising step to the next, in one rollout."""

    def __init__(self) -> None:
        self.way = "if the pipeline has an argument that disables it, set it in sampling.call"
        self.filled: dict[int, tuple[object, int]] = {}  # id of an object -> the object and the step that filled it

    def belong_to(self, pipe: DiffusionPipeline) -> None:
        """Find out how to run `pipe` without caches, for the error messages. Raises `ModelError` for stateful hooks."""
        import diffusers  # imported lazily: the driver of a run does not need it

        for component, model in pipe.components.items():
            if isinstance(model, torch.nn.Module) and (found := stateful_hooks(model)):
                raise ModelError(
                    f"{component} keeps state between denoising steps ({', '.join(found)}), which cannot be "
                    f"replayed: call pipe.{component}.disable_cache() first"
                )
        name = type(pipe).__name__
        switches = [p for p in inspect.signature(type(pipe).__call__).parameters if "cache" in p]
        if switches:
            self.way = f"set sampling.call.{switches[0]}=false"
        elif hasattr(diffusers, sibling := name.replace("KV", "")) and sibling != name:
            self.way = f"no argument disables it, but {sibling} has no cache: use it with these weights"

    def check_arguments(self, step: int, component: str, arguments: Tree) -> dict[int, set[int]]:
        """Return the ids of the tensors inside each object in `arguments`, by id of the object.

        Raises `ModelError` for an object that was filled in another step.
        """
        held = {}
        for value in _objects(arguments):
            if self.filled.get(id(value), (None, step))[1] != step:
                raise ModelError(
                    f"{component} reads at step {step} what an earlier step stored in a {type(value).__name__}, "
                    f"and a cache cannot be replayed: {self.way}"
                )
            held[id(value)] = {id(tensor) for tensor in _tensors(value)}
        return held

    def note(self, step: int, arguments: Tree, before: dict[int, set[int]], output: Tree) -> None:
        """Remember objects that contain new tensors after the call."""
        for value in _objects((arguments, output)):
            if {id(tensor) for tensor in _tensors(value)} - before.get(id(value), set()):
                self.filled.setdefault(id(value), (value, step))


def stateful_hooks(model: torch.nn.Module) -> list[str]:
    """Return the names of stateful hooks in `model`, such as those of diffusers' `enable_cache`."""
    registries = [registry for module in model.modules() if (registry := getattr(module, HOOKS, None)) is not None]
    return sorted({name for r in registries for name, hook in r.hooks.items() if hook._is_stateful})


def _objects(tree: Tree) -> Iterator[object]:
    """Yield the leaves of `tree` that have attributes."""
    for leaf in tree_leaves(tree):
        if hasattr(leaf, "__dict__") and not isinstance(leaf, torch.Tensor | torch.nn.Module | type):
            yield leaf


def _tensors(value: object, depth: int = DEPTH) -> Iterator[torch.Tensor]:
    """Yield the tensors inside `value`."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    inner: Iterable[object] = ()
    if isinstance(value, list | tuple):
        inner = value
    elif isinstance(value, dict):
        inner = value.values()
    elif hasattr(value, "__dict__"):
        inner = vars(value).values()
    if depth:
        for part in inner:
            yield from _tensors(part, depth - 1)


# --- Branching: rollouts that share the beginning of a recorded one, for tree algorithms.
#
# The pipeline's own `__call__` runs again. Before the branching step it is answered from the tape, as in a replay:
# methods, components and scheduler steps return the recorded values of the parents, and nothing is computed. At the
# branching step the pipeline forms its model output from the denoiser's recorded output, and from there it is a
# rollout.


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
    plan = _checked_plan(kernel, noise_level, solver, compression, cache, window, stop, noise_at)
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
    return BranchRecorder(parents, step, child, plan, generators).run(pipe, generators), child


def check_fork(tape: Tape, fork: int, index: Sequence[int]) -> None:
    """Raise `ReplayError` if the samples `index` of `tape` cannot be branched at step `fork`."""
    calls = tape.component_calls
    if tape.reads is not None:
        raise ReplayError("a compacted tape cannot be branched: branch before compacting it")
    if not index or set(index) - set(range(tape.batch_size)):
        raise ReplayError(f"samples {list(index)} cannot be branched: the tape has {tape.batch_size} samples")
    if not 0 <= fork < len(tape.steps) + any(c.step == len(tape.steps) for c in calls):
        raise ReplayError(f"step {fork} cannot be branched at: the tape has {len(tape.steps)} steps")
    if fork < len(tape.steps) and tape.steps[fork].rule.dt == 0:
        raise ReplayError(f"step {fork} cannot be branched at: compression skipped it")


class BranchRecorder(Recorder):
    """Head of a branch: the parents' answers up to step `fork`, then a rollout, see `hooks.Head`."""

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
        step = None if self._is_live() else self._parents_step(k, sample)
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
        recorded = self.parents.companion(len(self.tape.companions), sample)
        advance(scheduler, timestep)
        self.tape.companions.append(recorded)
        self.carried[id(scheduler)] = recorded.x_next
        return recorded.x_next

    def _parents_step(self, k: int, sample: torch.Tensor) -> TapeStep | None:
        """Return the parents' step `k`, None if their tape was stopped before it; `sample`: the pipeline's latents."""
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
