"""Recording: the tape of a pipeline's call, the hooks that route the call to a head, and rollouts recorded on tapes.

Sub-batches of a tape are taken without knowledge of the values' meaning. The batch dimension of a value is found by
comparing it with the same value of a call for one sample (the *probe*). A single shape is not enough: `[8, 77, 32]` may
be 8 prompts, 4 with their negatives, or 8 layers of one.
"""

from __future__ import annotations  # annotations name diffusers classes, which the driver of a run does not import

import contextlib
import functools
import inspect
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch.utils._pytree import tree_any, tree_leaves, tree_map

from gerl.engine.feature_cache import NO_CACHE, CachedDenoisers, FeatureCache
from gerl.engine.transitions import (
    COUNTS_STEPS,
    GIVES_MODEL_DTYPE,
    ONE_STEP,
    SOLVERS,
    Rule,
    Span,
    Timestep,
    Transitions,
    advance,
    differs,
    family,
    gaussian_log_prob,
    lcm_clean,
    predicts_clean,
    scm_clean,
    step_index,
)
from gerl.errors import ModelError, ReplayError
from gerl.protocol import References, RolloutTask

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline, SchedulerMixin
    from diffusers.guiders.guider_utils import GuiderOutput
    from diffusers.schedulers.scheduling_lcm import LCMSchedulerOutput
    from diffusers.schedulers.scheduling_scm import SCMSchedulerOutput
    from diffusers.schedulers.scheduling_utils import SchedulerOutput
    from diffusers.utils import BaseOutput

    from gerl.engine.hidden_states import Features, HiddenStates


Tree = object  # tensors and other values, in nested lists, tuples and dictionaries
Arguments = tuple[tuple[object, ...], dict[str, object]]  # positional and keyword arguments
Nested = TypeVar("Nested")


def _copy(tree: Nested) -> Nested:
    copied: Nested = tree_map(lambda v: v.clone() if torch.is_tensor(v) else v, tree)
    return copied


def detached_copy(tree: Nested) -> Nested:
    """Return `tree` with every tensor detached and cloned, so that later writes do not change the recording."""
    copied: Nested = tree_map(lambda v: v.detach().clone() if torch.is_tensor(v) else v, tree)
    return copied


def shapes(tree: Nested) -> Nested:
    """Return `tree` with its tensors on the `meta` device: shapes without values."""
    emptied: Nested = tree_map(lambda v: v.detach().to("meta") if torch.is_tensor(v) else v, tree)
    return emptied


def num_elements(tree: Tree) -> int:
    """Return the number of tensor elements in `tree`."""
    return sum(v.numel() for v in tree_leaves(tree) if torch.is_tensor(v))


def tensor_bytes(values: Iterable[Tree]) -> int:
    """Return the bytes of the tensors in `values`; shared storage counts once, tensors without values do not count."""
    tensors = (v for v in tree_leaves(list(values)) if torch.is_tensor(v) and not v.is_meta)
    storages = (v.untyped_storage() for v in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def materialised(tree: Nested, device: torch.device | None) -> Nested:
    """Return `tree` with zeros on `device` for tensors that were kept as shapes only."""
    filled: Nested = tree_map(
        lambda v: torch.zeros_like(v, device=device) if torch.is_tensor(v) and v.is_meta else v, tree
    )
    return filled


def rows(tensor: torch.Tensor, index: Sequence[int], n: int) -> torch.Tensor:
    """Select the samples `index` of a `[n, ...]` or `[n * r, ...]` tensor with consecutive rows of each sample."""
    return tensor.unflatten(0, (n, -1))[list(index)].flatten(0, 1)


def batch_size(call: Mapping[str, object]) -> int:
    """Return the number of samples of a pipeline call: the length of its prompt list, or of its prompt embeddings.

    A prompt that is a string, for pipelines that take no list, is one sample.
    """
    for name in ("prompt", "prompt_embeds"):
        value = call.get(name)
        if isinstance(value, list | torch.Tensor):
            return len(value)
    return 1


def select_call(call: Mapping[str, object], index: Sequence[int]) -> dict[str, object]:
    """Return the keyword arguments of a call for some samples: per-sample lists and tensors are indexed.

    A list of numbers as long as the batch (`sigmas`, say) is a schedule, and `References` are those of every sample.
    Lists of values per sample are copied.
    """
    n = batch_size(call)

    def pick(value: object) -> object:
        if isinstance(value, References):
            return value
        if isinstance(value, list) and len(value) == n and not isinstance(value[0], int | float):
            return [value[i] for i in index]
        if torch.is_tensor(value) and value.ndim and len(value) == n:
            return value[list(index)]
        return value

    return {name: pick(value) for name, value in call.items()}


def take(full: Any, probe_value: Any, index: Sequence[int], n: int, probed: int = 1, graph: bool = False) -> Any:
    """Select the samples `index` of `full`, a value for `n` samples; `probe_value` is the same for `probed` samples.

    Handles `[m * n, ...]` (negative and positive prompts, say), the batch in a later dimension, lists with an entry per
    sample, and nested dictionaries and tuples. If `probe_value` has another structure (a mask that is None without
    padding), the first dimension of size `n` is used. A value without batch dimension is copied completely, and so is
    everything if `n` equals `probed` (1, or 2 if `n` is 1). `graph`: keep the gradient.
    """
    copied = _copy if graph else detached_copy

    def rows_of(value: torch.Tensor, dim: int, _: torch.Tensor) -> torch.Tensor:
        where = torch.as_tensor(list(index), device=value.device)
        value = value if graph else value.detach()
        return value.unflatten(dim, (-1, n)).index_select(dim + 1, where).flatten(dim, dim + 1)

    def entries_of(value: list[Any], _: list[Any]) -> list[Any]:
        return type(value)(copied(value[start + i]) for start in range(0, len(value), n) for i in index)

    return copied(full) if n == probed else map_rows(full, full, probe_value, n, probed, rows_of, entries_of, copied)


def entries(full: list[Any] | tuple[Any, ...], like: object, n: int, probed: int) -> int:
    """Return how many entries of `full` each of `n` samples has, 0 if entries are not samples; `like`: see `take`."""
    known = isinstance(like, list | tuple)
    multiple = len(like) / probed if known else int(isinstance(full, list) and len(full) == n)  # type: ignore[arg-type]
    return int(multiple) if multiple and len(full) == multiple * n else 0


def batch_dim(full: torch.Tensor, like: object, n: int, probed: int) -> int | None:
    """Return the first dimension of `full` that grows with the number of samples `n`; `like`: see `take`."""
    multiples: list[float] = [int(size == n) for size in full.shape]
    if isinstance(like, torch.Tensor) and like.ndim == full.ndim:
        multiples = [size / probed for size in like.shape]
    found = (dim for dim, multiple in enumerate(multiples) if multiple and full.shape[dim] == multiple * n)
    return next(found, None)


def map_rows(
    value: Any,
    recorded: Any,
    like: Any,
    n: int,
    probed: int,
    tensor: Callable[[torch.Tensor, int, torch.Tensor], torch.Tensor],
    listed: Callable[[list[Any], list[Any]], list[Any]],
    rest: Callable[[Any], Any] = lambda value: value,
) -> Any:
    """Map `value`, with the structure of the `recorded` value of `n` samples, to other rows; gradients flow.

    `tensor(value, dim, recorded)` maps a tensor with rows in `dim`, `listed(value, recorded)` a list or tuple with
    entries per sample, and `rest` values without rows; `like` and `probed`: see `take`.
    """
    if isinstance(value, torch.Tensor):
        dim = batch_dim(recorded, like, n, probed)
        return rest(value) if dim is None else tensor(value, dim, recorded)
    if isinstance(value, list | tuple) and entries(recorded, like, n, probed):
        return listed(value, recorded)  # type: ignore[arg-type]
    if not isinstance(value, list | tuple | dict):
        return rest(value)
    values = value.values() if isinstance(value, dict) else value
    matched = zip(values, pairs(recorded, like), strict=True)
    parts = [map_rows(v, *pair, n, probed, tensor, listed, rest) for v, pair in matched]
    if isinstance(value, dict):
        named = dict(zip(value, parts, strict=True))
        return named if type(value) is dict else type(value)(**named)
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)


def pairs(value: Any, like: Any) -> list[tuple[Any, Any]]:
    """Pair the parts of a list, tuple or dictionary with those of `like`, or with None if the structures differ."""
    if isinstance(value, dict):
        named = like if isinstance(like, dict) else {}
        return [(part, named.get(name)) for name, part in value.items()]
    alike = isinstance(like, list | tuple) and len(like) == len(value)
    return list(zip(value, like if alike else [None] * len(value), strict=True))


def same(ours: Tree, theirs: Tree) -> bool:
    """Whether two structures have equal tensors at the same positions."""
    a, b = tree_leaves(ours), tree_leaves(theirs)
    pairs = list(zip(a, b, strict=False))
    if len(a) != len(b) or any(torch.is_tensor(x) != torch.is_tensor(y) for x, y in pairs):
        return False
    tensors = [(x, y) for x, y in pairs if torch.is_tensor(x) and torch.is_tensor(y) and x is not y]
    if any((x.shape, x.dtype, x.device) != (y.shape, y.dtype, y.device) for x, y in tensors):
        return False
    flags: dict[torch.device, list[torch.Tensor]] = {}
    for x, y in tensors:
        flags.setdefault(x.device, []).append((x != y).any())
    return not any(bool(torch.stack(found).any()) for found in flags.values())  # one wait per device


# --- The tape: recorded calls


@dataclass
class TapeStep:
    """Recording of one `scheduler.step` of the rollout."""

    rule: Rule
    x: torch.Tensor  # [B, ...] fp32 latents before the step
    x_next: torch.Tensor  # [B, ...] fp32 latents after it
    log_prob: torch.Tensor | None  # [B] fp32, None at deterministic steps
    mean: torch.Tensor | None  # [B, ...] fp32 mean of x_next, None at deterministic steps
    num_answers: int  # number of answers received by the pipeline before the step
    written: torch.Tensor | None = None  # [B, ...] bool, part of x overwritten by the pipeline since the last step


@dataclass
class SecondaryStep:
    """Deterministic step of a secondary modality (sound of a video), after `step` steps of the trained modality."""

    step: int
    x: torch.Tensor  # [B, ...] fp32 latents before the step
    x_next: torch.Tensor  # [B, ...] fp32 latents after it

    @property
    def deviation(self) -> str:
        """Error message for a replay or branch that reaches other latents."""
        return (
            f"the latents of the second modality differ from the recorded ones after step {self.step - 1}: the "
            "pipeline cannot be replayed"
        )


@dataclass
class Answer:
    """Value returned by a method (`encode_prompt`, `prepare_latents`, ...)."""

    method: str
    value: Tree


@dataclass
class ComponentCall:
    """Output of a component called during scheduler step `step`, and its arguments as shapes (device `meta`)."""

    step: int
    component: str
    output: Tree
    inputs: Tree = None
    elements: int = 0  # number of elements in the output, while recording
    reads: int | None = None  # the earlier step that filled a cache of its arguments (keys and values of a prefix)
    fills: bool = False  # whether it put tensors into an object, which later steps may read


def probed_call(
    calls: Sequence[ComponentCall], recorded: ComponentCall, nth: int, n: int, probed: int
) -> ComponentCall:
    """Return the probe's call that reveals the rows of `recorded`, the `nth` call of its step.

    The probe ends at the first step. An expert that is called only later is assumed to be like the other; an additional
    call of later steps (skip-layer guidance) has its rows in the first dimension of its output.
    """
    like = [c for c in calls if c.component == recorded.component] or list(calls[-1:])
    found = like[min(nth, len(like) - 1)] if like else ComponentCall(0, "", None)
    full, shown = tree_leaves(recorded.output), tree_leaves(found.output)
    whole = [value for value in full if torch.is_tensor(value)]
    if not like or nth < len(like) or not whole:
        return found
    if len(full) == len(shown) and all(
        batch_dim(v, s, n, probed) is not None for v, s in zip(full, shown, strict=True)
    ):
        return found
    rows = whole[0].shape[0] if whole[0].ndim else 0

    def fewer(value: object) -> object:
        if not (torch.is_tensor(value) and value.ndim and value.shape[0] == rows and rows % n == 0):
            return value
        return torch.empty(rows // n * probed, *value.shape[1:], device="meta")

    return replace(recorded, output=tree_map(fewer, recorded.output), inputs=tree_map(fewer, recorded.inputs))


@dataclass(frozen=True)
class RequiredTensors:
    """Tensors of a tape that an algorithm needs; a compacted tape has only shapes of the others (`compact`)."""

    steps: frozenset[int]  # trained steps, replayed all at once or the first of them
    means: bool = True  # recorded means of the trained steps
    outputs: bool = True  # denoiser outputs at guided trained steps, for replays with cfg other than joint
    forward: bool = False  # the clean latents, to be noised again (`latents` of a replay)
    finished: bool = False  # the clean latents, in addition to those of the trained steps
    chain: bool = False  # any step, one at a time, and everything needed to decode the finished latents


@dataclass
class Tape:
    """Recorded call of a pipeline.

    A stopped tape has the component calls of the step before which it stopped, but not that step. `probe`: the tape of
    the same call for one sample (for two, if this one has only one), stopped at the first step, which reveals the batch
    dimension of each value; needed only to replay sub-batches and to branch. `reads` is set if the tape is compacted.
    """

    call: dict[str, object]
    batch_size: int
    steps: list[TapeStep] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    component_calls: list[ComponentCall] = field(default_factory=list)
    companions: list[SecondaryStep] = field(default_factory=list)
    probe: Tape | None = None
    reads: RequiredTensors | None = None
    features: Features | None = None  # for a critic, with `SamplingPlan.observer`

    @classmethod
    def of(cls, call: Mapping[str, object], index: Sequence[int] | None = None) -> Tape:
        """Return an empty tape of `call` for its samples `index` (None: all), without generators."""
        chosen = range(batch_size(call)) if index is None else index
        kept = {name: value for name, value in call.items() if name != "generator"}
        return cls(select_call(kept, chosen), len(chosen))

    def fresh_call(self) -> dict[str, object]:
        """Return the call with copied lists, since some pipelines modify them."""
        return select_call(self.call, range(self.batch_size))

    def add_call(
        self, component: str, output: Tree, inputs: Tree, reads: int | None = None, fills: bool = False
    ) -> None:
        """Record a component's call at the current denoising step."""
        output, inputs = _without_caches(output), _without_caches(inputs)
        kept, elements, step = detached_copy(output), num_elements(output), len(self.steps)
        self.component_calls.append(ComponentCall(step, component, kept, shapes(inputs), elements, reads, fills))

    @property
    def stochastic_steps(self) -> list[int]:
        """Indices of the stochastic steps, which have a log-probability."""
        return [k for k, step in enumerate(self.steps) if step.log_prob is not None]

    def overwritten(self, k: int) -> torch.Tensor | None:
        """Return a mask `[B, ...]` bool of the latents after step `k` that are overwritten and reach no image.

        An inpainting pipeline sets the surround of its mask after each step; nothing is recorded after the last, for
        which it is the mask before it. None: nothing, or all, as by a callback that scales the latents.
        """
        following = self.steps[min(k + 1, len(self.steps) - 1)].written
        if following is not None and following.is_meta:
            raise ReplayError(f"what the pipeline overwrote after step {k} was not kept in this compacted tape")
        return None if following is None or bool(following.all()) else following

    def looped_components(self) -> set[str]:
        """Return the components called in the denoising loop, or last before it (as an expert for high noise only)."""
        inside = {c.component for c in self.component_calls if c.step > 0}
        first = [c.component for c in self.component_calls if c.step == 0]
        return inside | set(first[-1:]) if inside else set(first)

    def called_at(self, steps: Iterable[int]) -> set[int]:
        """Return the steps of the denoiser calls whose outputs `steps` use: of each, the last at it or before."""
        looped = self.looped_components()
        called = {c.step for c in self.component_calls if c.component in looped}
        return {max(before) for k in steps if (before := [c for c in called if c <= k])}

    def live_at(self, steps: Iterable[int]) -> set[int]:
        """Return the steps of the denoiser calls that training `steps` needs, with those that fill their caches."""
        used = self.called_at(steps)
        return used | {c.reads for c in self.component_calls if c.step in used and c.reads is not None}

    @property
    def filling_steps(self) -> set[int]:
        """Indices of the steps that fill caches which later ones read."""
        return {c.reads for c in self.component_calls if c.reads is not None}

    def companion(self, position: int) -> SecondaryStep:
        """Return step `position` of the secondary modality."""
        if position == len(self.companions):
            raise ReplayError("the pipeline steps a second modality, which it did not in the rollout")
        return self.companions[position]

    def rows(self, index: Sequence[int]) -> Tape:
        """Select the samples `index`, repeats allowed; the result can be replayed, branched and pickled independently.

        Latents shared by steps stay shared. Raises `ReplayError` without a probe that reveals the batch dimensions.
        """
        if tuple(index) == tuple(range(self.batch_size)):
            return self
        if self.probe is None or self.probe.batch_size == self.batch_size:
            raise ReplayError("replaying a sub-batch needs a tape recorded with probe=True")
        if self.batch_size == 1:
            return self._rows(index, self.start())
        # a tape of one sample needs a probe of another number of samples
        alike = self.probe if len(index) > 1 else self.start()._rows([*index, *index], None)
        return self._rows(index, alike)

    def start(self) -> Tape:
        """Return the shapes of everything recorded before the first step: the probe for other numbers of samples."""
        answers = self.answers[: self.steps[0].num_answers] if self.steps else self.answers
        calls = [c for c in self.component_calls if c.step == 0]
        return Tape(
            self.call,
            self.batch_size,
            answers=[Answer(a.method, shapes(a.value)) for a in answers],
            component_calls=[replace(c, output=shapes(c.output)) for c in calls],
            probe=self.probe,
        )

    def _rows(self, index: Sequence[int], probe: Tape | None) -> Tape:
        assert self.probe is not None
        n, probed, alike = self.batch_size, self.probe.batch_size, self.probe
        picked: dict[int, torch.Tensor] = {}  # by id, since the latents after a step are those before the next

        def pick(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in picked:
                picked[id(tensor)] = rows(tensor, index, n)
            return picked[id(tensor)]

        def step(recorded: TapeStep) -> TapeStep:
            log_prob = None if recorded.log_prob is None else pick(recorded.log_prob)
            mean = None if recorded.mean is None else pick(recorded.mean)
            written = None if recorded.written is None else pick(recorded.written)
            x, x_next = pick(recorded.x), pick(recorded.x_next)
            return replace(recorded, x=x, x_next=x_next, log_prob=log_prob, mean=mean, written=written)

        def answer(position: int, recorded: Answer) -> Answer:
            # beyond the probe's end (later loops of a long pipeline) the last value of that name reveals the rows
            like = alike.answers[position : position + 1] or [a for a in alike.answers if a.method == recorded.method]
            return replace(recorded, value=take(recorded.value, like[-1].value if like else None, index, n, probed))

        def component_call(recorded: ComponentCall, nth: int) -> ComponentCall:
            shown = probed_call(alike.component_calls, recorded, nth, n, probed)
            output = take(recorded.output, shown.output, index, n, probed)
            return replace(recorded, output=output, inputs=take(recorded.inputs, shown.inputs, index, n, probed))

        seen: Counter[tuple[int, str]] = Counter()
        calls = []
        for c in self.component_calls:
            calls.append(component_call(c, seen[c.step, c.component]))
            seen[c.step, c.component] += 1
        return replace(
            self,
            call=select_call(self.call, index),
            batch_size=len(index),
            steps=[step(s) for s in self.steps],
            answers=[answer(i, a) for i, a in enumerate(self.answers)],
            component_calls=calls,
            companions=[replace(c, x=pick(c.x), x_next=pick(c.x_next)) for c in self.companions],
            probe=probe,
            features=None if self.features is None else self.features.rows(index, n),
        )


# --- Structure of the denoiser calls

Structure = tuple[tuple[str, float], ...]  # component and rows per row of latents, for each call of a step


def leading(output: Tree) -> torch.Tensor | list[object]:
    """Return the first tensor or list of an output, which has its rows; an empty list if there is none."""
    values = tree_leaves(output, is_leaf=lambda value: isinstance(value, list))
    return next((v for v in values if isinstance(v, list) or (torch.is_tensor(v) and v.ndim)), [])


def looped_calls(tape: Tape) -> dict[int, list[ComponentCall]]:
    """Return the calls in the denoising loop, by step."""
    looped, calls = tape.looped_components(), dict[int, list[ComponentCall]]()
    for call in tape.component_calls:
        if call.component in looped:
            calls.setdefault(call.step, []).append(call)
    return calls


def call_structure(tape: Tape, calls: list[ComponentCall]) -> Structure:
    return tuple((c.component, len(leading(c.output)) / len(tape.steps[c.step].x)) for c in calls)


def has_roles(structure: Structure) -> bool:
    """Whether a step has other calls than a single one with one row per row of latents, as guidance does."""
    return [rows for _, rows in structure] != [1.0]


def is_guided(tape: Tape, steps: Iterable[int]) -> bool:
    """Whether the roles of the denoiser calls at `steps` have to be found, which needs their outputs."""
    calls = looped_calls(tape)
    return any(has_roles(call_structure(tape, calls[k])) for k in steps)


# --- Trajectories: recordings of tasks, as small as the algorithm allows, which can be stored, split or sent


def compact(tape: Tape, reads: RequiredTensors) -> Tape:
    """Compact `tape`: replace tensors that a replay of `reads` does not need by their shapes (device `meta`).

    A replay ends at the last trained step, runs the denoiser at the trained ones and answers from the tape elsewhere.
    It can train all of `reads.steps`, or the first of them, with `reads.chain` any of them; anything else raises
    `ReplayError`, and so does a branch. The result shares its tensors with `tape`.
    """
    final = len(tape.steps) - 1
    last = max((k for k in reads.steps if k <= final), default=-1)  # a replay raises an error for other steps
    looped, live = tape.looped_components(), tape.live_at(reads.steps)
    num_answers = tape.steps[last].num_answers if last >= 0 else 0
    if reads.chain:  # at any step all others answer from the tape, and the pipeline runs to its end to decode
        live, num_answers = set(), len(tape.answers)
    outputs = reads.outputs and is_guided(tape, live)
    # the caller's latents replace those of trained steps, but finding guidance roles uses the recorded ones
    given = reads.steps if reads.forward and not outputs else frozenset()

    # gradients pass through the rules of untrained steps, and leaps use their latents
    end = final if reads.chain else last

    def is_left(k: int) -> bool:
        return k < last and k + 1 not in given if reads.forward else k <= end

    # the step after a trained one shows which of its latents reach the images
    after = frozenset() if reads.forward else {min(k + 1, final) for k in (*reads.steps, final)}
    steps = [
        replace(
            step,
            # the initial latents are identified by their values, as are later ones that a pipeline overwrites
            x=step.x if k <= end and (k == 0 or k not in given or step.written is not None) else shapes(step.x),
            written=step.written
            if k in {*given, *after} or (given and k == 1) or reads.chain
            else shapes(step.written),
            x_next=step.x_next
            if is_left(k) or ((reads.forward or reads.finished) and k == final)
            else shapes(step.x_next),
            mean=step.mean if reads.means and not reads.forward and k in reads.steps else shapes(step.mean),
        )
        for k, step in enumerate(tape.steps)
    ]
    calls = [
        c
        if c.component in looped and c.step <= last and (outputs or c.step not in live)
        else replace(c, output=shapes(c.output))
        for c in tape.component_calls
    ]
    answers = [a if i < num_answers else replace(a, value=shapes(a.value)) for i, a in enumerate(tape.answers)]
    kept = final + 1 if reads.chain else last
    companions = [c if c.step <= kept else replace(c, x=shapes(c.x), x_next=shapes(c.x_next)) for c in tape.companions]
    return replace(tape, steps=steps, answers=answers, component_calls=calls, companions=companions, reads=reads)


@dataclass(frozen=True)
class Trajectory:
    """Recorded task to train on: a compacted tape per segment, the optimizer steps before, the rank that sampled it."""

    task: RolloutTask
    tapes: tuple[Tape, ...]
    policy_version: int
    owner: int

    @property
    def nbytes(self) -> int:
        """Bytes of the recorded tensors; the probe, shared by all trajectories, has shapes only."""
        steps = ([s.x, s.x_next, s.mean, s.log_prob, s.written] for tape in self.tapes for s in tape.steps)
        companions = ([c.x, c.x_next] for tape in self.tapes for c in tape.companions)
        answers = (a.value for tape in self.tapes for a in tape.answers)
        outputs = (c.output for tape in self.tapes for c in tape.component_calls)
        features = ([f.hidden, f.prompt] for tape in self.tapes if (f := tape.features) is not None)
        return tensor_bytes([*steps, *companions, *answers, *outputs, *features])

    def rows(self, index: Sequence[int]) -> Trajectory:
        """Select the samples `index`. Raises `ReplayError` for a tree."""
        if any(segment.parent is not None for segment in self.task.segments):
            raise ReplayError(f"task {self.task.id} is a tree, whose samples share their trunk: it cannot be split")
        if len(self.task.segments) > 1:  # sampled in several calls
            places = {leaf: (i, r) for i, s in enumerate(self.task.segments) for r, leaf in enumerate(s.leaves)}
            found = [(self.task.segments[i], self.tapes[i], r) for i, r in (places[i] for i in index)]
            segments = [replace(s, seeds=(s.seeds[r],), leaves=(n,)) for n, (s, _, r) in enumerate(found)]
            tapes = [tape if tape.batch_size == 1 else tape.rows([r]) for _, tape, r in found]
        else:
            (s,), (tape,) = self.task.segments, self.tapes
            segments = [replace(s, seeds=tuple(s.seeds[i] for i in index), leaves=tuple(range(len(index))))]
            tapes = [tape.rows(index)]
        task = replace(self.task, samples=[self.task.samples[i] for i in index], segments=tuple(segments))
        return replace(self, task=task, tapes=tuple(tapes))


# --- Hooks that route a pipeline's calls to a head that records or replays: gerl's only patches, always undone

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

        def act(found: bool) -> None:
            if found:
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
            for found, (_, act) in zip(torch.stack([flag for flag, _ in pending]).tolist(), pending, strict=True):
                act(found)


class TapeHead(LatentsTracker):
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

    def next_latents(
        self, model_output: torch.Tensor, sample: torch.Tensor, source: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the latents after a scheduler step from `sample`, fp32; `source`: see `source_of`."""
        raise NotImplementedError

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

    def __init__(self, head: Recorder | TapeHead, scheduler: SchedulerMixin) -> None:
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
        given: tuple[torch.Tensor, Timestep, torch.Tensor],
        known: torch.Tensor | None,
    ) -> None:
        self.next_of, self.scheduler, self.given, self.known = next_of, scheduler, given, known
        self.index = step_index(scheduler, given[1])
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
    kept = [(e, e.forward, e.backward) for e in map(COUNTED.get, modules) if e is not None]
    yield
    for evaluations, forward, backward in kept:
        evaluations.forward, evaluations.backward = forward, backward


@contextlib.contextmanager
def routed(pipe: DiffusionPipeline, head: Recorder | TapeHead) -> Iterator[None]:
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
            if isinstance(head, Recorder) and isinstance(target, torch.nn.Module) and target in COUNTED:
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
    found = Tape({**select_call(tape.call, index), **changed}, len(index))
    recorder = Recorder(found, DETERMINISTIC, None)
    recorder.skipping = StructureOnly(len(tape.steps) if steps is None else steps)
    with uncounted(pipe):
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


class Recorder(LatentsTracker):
    """Head of a rollout or a branch, which receives the routed calls."""

    def __init__(
        self, tape: Tape, plan: SamplingPlan, generators: Sequence[torch.Generator] | None, init_spread: float = 0.0
    ) -> None:
        """Initialise for one call; `init_spread`: share of `generators` in the noise that the pipeline samples."""
        super().__init__()
        self.tape, self.plan, self.generators, self.init_spread = tape, plan, generators, init_spread
        self.window, self.stop = plan.window, plan.stop
        self.transitions = Transitions(plan)
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
        given = bound.get("generator")
        if given is None or self.generators is None:
            return common
        own = sampler(**bound | {"generator": list(self.generators) if isinstance(given, list) else self.generators[0]})
        assert torch.is_tensor(common) and torch.is_tensor(own)
        self.mixed = True
        return math.sqrt(1 - self.init_spread**2) * common + self.init_spread * own

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

    def _note_written(self, k: int, carried: torch.Tensor, written: torch.Tensor, found: bool) -> None:
        """Complete step `k`, before which the pipeline edited the `carried` latents, or `found` them unedited."""
        if not found:
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
        self.resolve()
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


# --- Caches filled in one denoising step and read in later ones: keys and values of a prompt or a reference image.
#
# A replay that trains a step which reads a cache also runs the step that fills it, and the gradient flows through the
# cache. Any object with tensors inside that is not a container may be a cache. A cache that later steps fill again is
# refused: the gradient of a step would flow through all steps before it.

HOOKS = "_diffusers_hook"  # the attribute in which diffusers keeps a module's hooks
DEPTH = 4  # levels of attributes, lists and dictionaries inside a cache: layers, their parts, keys and values


class Caches:
    """Detector of objects that carry state from one denoising step to later ones, in one rollout."""

    def __init__(self) -> None:
        self.way = "if the pipeline has an argument that disables it, set it in sampling.call"
        self.filled: dict[int, tuple[object, int]] = {}  # id of an object -> the object and the step that filled it

    def belong_to(self, pipe: DiffusionPipeline) -> None:
        """Find out how to run `pipe` without caches, for the error messages. Raises `ModelError` for stateful hooks."""
        for component, model in pipe.components.items():
            if isinstance(model, torch.nn.Module) and (found := stateful_hooks(model)):
                raise ModelError(
                    f"{component} keeps state between denoising steps ({', '.join(found)}), which cannot be "
                    f"replayed: call pipe.{component}.disable_cache() first"
                )
        switches = [p for p in inspect.signature(type(pipe).__call__).parameters if "cache" in p]
        if switches:
            self.way = f"set sampling.call.{switches[0]}=false"

    def arguments(self, step: int, arguments: Tree) -> tuple[dict[int, set[int]], int | None]:
        """Return the ids of the tensors in each object of a call, and the earlier step that filled one of them."""
        held, reads = {}, None
        for value in objects_of(arguments):
            if (filled := self.filled.get(id(value), (None, step))[1]) != step:
                reads = filled
            held[id(value)] = {id(tensor) for tensor in tensors_inside(value)}
        return held, reads

    def note(self, step: int, component: str, arguments: Tree, before: dict[int, set[int]], output: Tree) -> bool:
        """Remember objects that contain new tensors after the call, and return whether there are any.

        Raises `ModelError` if one is filled again.
        """
        fills = False
        for value in objects_of((arguments, output)):
            if {id(tensor) for tensor in tensors_inside(value)} - before.get(id(value), set()):
                fills = True
                filled = self.filled.setdefault(id(value), (value, step))[1]
                if filled != step:
                    raise ModelError(
                        f"{component} fills at step {step} a {type(value).__name__} again that step {filled} filled, "
                        f"and such a cache cannot be replayed: {self.way}"
                    )
        return fills


def _without_caches(tree: Nested) -> Nested:
    """Return `tree` with None for objects that have tensors inside."""
    kept: Nested = tree_map(lambda v: None if any(True for o in objects_of(v) for _ in tensors_inside(o)) else v, tree)
    return kept


def cut_caches(arguments: Tree, output: Tree, before: set[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Cut the graph at the tensors that a call has put into caches; return pairs of a tensor and the leaf in its place.

    `before`: the ids of the tensors that the caches held before the call.
    """
    found: list[tuple[torch.Tensor, torch.Tensor]] = []

    def leaf(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in before or not tensor.requires_grad:
            return tensor
        found.append((tensor, tensor.detach().requires_grad_()))
        return found[-1][1]

    for value in {id(value): value for value in objects_of((arguments, output))}.values():
        _replace_tensors(value, leaf)
    return found


def _replace_tensors(value: object, new: Callable[[torch.Tensor], torch.Tensor], depth: int = DEPTH) -> None:
    """Replace the tensors inside `value`, in place."""
    inner: Any = value if isinstance(value, list | dict) else vars(value) if hasattr(value, "__dict__") else ()
    for key in list(inner) if isinstance(inner, dict) else range(len(inner)):
        if isinstance(inner[key], torch.Tensor):
            inner[key] = new(inner[key])
        elif depth:
            _replace_tensors(inner[key], new, depth - 1)


def stateful_hooks(model: torch.nn.Module) -> list[str]:
    """Return the names of stateful hooks in `model`, such as those of diffusers' `enable_cache`."""
    registries = [registry for module in model.modules() if (registry := vars(module).get(HOOKS)) is not None]
    return sorted({name for r in registries for name, hook in r.hooks.items() if hook._is_stateful})


def objects_of(tree: Tree) -> Iterator[object]:
    """Yield the leaves of `tree` that have attributes."""
    for leaf in tree_leaves(tree):
        if hasattr(leaf, "__dict__") and not isinstance(leaf, torch.Tensor | torch.nn.Module | type):
            yield leaf


def tensors_inside(value: object, depth: int = DEPTH) -> Iterator[torch.Tensor]:
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
            yield from tensors_inside(part, depth - 1)


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
