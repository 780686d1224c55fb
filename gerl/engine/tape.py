"""The tape of a pipeline's call: recorded steps, answers and component calls; compacted, selected and stored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch.utils._pytree import tree_leaves, tree_map

from gerl.engine.kv_caches import without_caches
from gerl.engine.rows import (
    Tree,
    batch_dim,
    batch_size,
    detached_copy,
    leading,
    num_elements,
    rows,
    select_call,
    shapes,
    take,
    tensor_bytes,
)
from gerl.engine.transitions import Rule
from gerl.errors import ReplayError
from gerl.protocol import RolloutTask


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
    probe = like[min(nth, len(like) - 1)] if like else ComponentCall(0, "", None)
    full, shown = tree_leaves(recorded.output), tree_leaves(probe.output)
    whole = [value for value in full if torch.is_tensor(value)]
    if not like or nth < len(like) or not whole:
        return probe
    if len(full) == len(shown) and all(
        batch_dim(v, s, n, probed) is not None for v, s in zip(full, shown, strict=True)
    ):
        return probe
    rows = whole[0].shape[0] if whole[0].ndim else 0

    def fewer(value: object) -> object:
        if not (torch.is_tensor(value) and value.ndim and value.shape[0] == rows and rows % n == 0):
            return value
        return torch.empty(rows // n * probed, *value.shape[1:], device="meta")

    return replace(recorded, output=tree_map(fewer, recorded.output), inputs=tree_map(fewer, recorded.inputs))


@dataclass
class Features:
    """Pooled hidden states by step, `[B, d]` fp32, and prompt embeddings `[B, p]` fp32, None if there are none."""

    hidden: dict[int, torch.Tensor] = field(default_factory=dict)
    prompt: torch.Tensor | None = None

    def rows(self, index: Sequence[int], n: int) -> Features:
        """Return a copy for the samples `index` of `n`."""
        prompt = None if self.prompt is None else rows(self.prompt, index, n)
        return Features({k: rows(values, index, n) for k, values in self.hidden.items()}, prompt)


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
        arguments = {name: value for name, value in call.items() if name != "generator"}
        return cls(select_call(arguments, chosen), len(chosen))

    def fresh_call(self) -> dict[str, object]:
        """Return the call with copied lists, since some pipelines modify them."""
        return select_call(self.call, range(self.batch_size))

    def add_call(
        self, component: str, output: Tree, inputs: Tree, reads: int | None = None, fills: bool = False
    ) -> None:
        """Record a component's call at the current denoising step."""
        output, inputs = without_caches(output), without_caches(inputs)
        copied, elements, step = detached_copy(output), num_elements(output), len(self.steps)
        self.component_calls.append(ComponentCall(step, component, copied, shapes(inputs), elements, reads, fills))

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
    read_steps = reads.steps if reads.forward and not outputs else frozenset()

    # gradients pass through the rules of untrained steps, and leaps use their latents
    end = final if reads.chain else last

    def is_left(k: int) -> bool:
        return k < last and k + 1 not in read_steps if reads.forward else k <= end

    # the step after a trained one shows which of its latents reach the images
    after = frozenset() if reads.forward else {min(k + 1, final) for k in (*reads.steps, final)}
    steps = [
        replace(
            step,
            # the initial latents are identified by their values, as are later ones that a pipeline overwrites
            x=step.x if k <= end and (k == 0 or k not in read_steps or step.written is not None) else shapes(step.x),
            written=step.written
            if k in {*read_steps, *after} or (read_steps and k == 1) or reads.chain
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
    last_state = final + 1 if reads.chain else last
    companions = [
        c if c.step <= last_state else replace(c, x=shapes(c.x), x_next=shapes(c.x_next)) for c in tape.companions
    ]
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
            chosen = [(self.task.segments[i], self.tapes[i], r) for i, r in (places[i] for i in index)]
            segments = [replace(s, seeds=(s.seeds[r],), leaves=(n,)) for n, (s, _, r) in enumerate(chosen)]
            tapes = [tape if tape.batch_size == 1 else tape.rows([r]) for _, tape, r in chosen]
        else:
            (s,), (tape,) = self.task.segments, self.tapes
            segments = [replace(s, seeds=tuple(s.seeds[i] for i in index), leaves=tuple(range(len(index))))]
            tapes = [tape.rows(index)]
        task = replace(self.task, samples=[self.task.samples[i] for i in index], segments=tuple(segments))
        return replace(self, task=task, tapes=tuple(tapes))
