"""The record of a rollout: everything a replay needs to run the same denoising loop, with secondary modalities."""

from __future__ import annotations  # of diffusers, which the driver of a run does without

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch.utils._pytree import tree_leaves, tree_map

from gerl.engine.batching import Tree, batch_dim, rows, select_call, shapes, take
from gerl.engine.kernels import Rule
from gerl.engine.transitions import Timestep, advance
from gerl.errors import ReplayError

if TYPE_CHECKING:
    from diffusers import SchedulerMixin


# --- The record of a rollout: everything a replay needs to run the same denoising loop again


@dataclass
class TapeStep:
    """One `scheduler.step` of the rollout."""

    rule: Rule
    x: torch.Tensor  # [B, ...] fp32 latents before the step
    x_next: torch.Tensor  # [B, ...] fp32 latents after it
    log_prob: torch.Tensor | None  # [B] fp32, None where the step was deterministic
    mean: torch.Tensor | None  # [B, ...] fp32 mean that x_next was drawn around, None where deterministic
    num_answers: int  # answers the pipeline had received when it took the step
    written: torch.Tensor | None = None  # [B, ...] bool, what of x the pipeline wrote over since the last step


@dataclass
class SecondaryStep:
    """A step of a secondary modality, such as the sound of a video. Always deterministic.

    It was taken after `step` steps of the trained modality.
    """

    step: int
    x: torch.Tensor  # [B, ...] fp32 latents before the step
    x_next: torch.Tensor  # [B, ...] fp32 latents after it


@dataclass
class Answer:
    """The value that a method (`encode_prompt`, `prepare_latents`, ...) returned."""

    method: str
    value: Tree


@dataclass
class ComponentCall:
    """The output of a component (`transformer`, `controlnet`, ...) called during scheduler step `step`.

    `inputs`: the shapes of its arguments, positional and named, as tensors on the device `meta`.
    """

    step: int
    component: str
    output: Tree
    inputs: Tree = None


def probed_call(
    calls: Sequence[ComponentCall], recorded: ComponentCall, nth: int, n: int, probed: int
) -> ComponentCall:
    """Find the call of a probe that shows where the rows of `recorded`, the `nth` call of its step, are.

    The probe ends at the first step. An expert that is called later only is like the other, and a call that later steps
    make besides (skip-layer guidance) has the rows of its own: as many times `n` as its output's first dimension is.
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
    """The tensors of a tape that an algorithm needs; a compacted tape has shapes of the rest (`record.compact`)."""

    steps: frozenset[int]  # trained, all of them in one replay or the first of them
    means: bool = True  # recorded means of the trained steps
    outputs: bool = True  # the denoiser's outputs at guided trained steps, for replays with cfg other than joint
    forward: bool = False  # the clean latents, which are noised again (`latents` of a replay)
    finished: bool = False  # the clean latents besides those of the trained steps
    chain: bool = False  # any steps, one at a time, and whatever the decoding of the finished latents needs

    @property
    def clean(self) -> bool:
        """Whether the clean latents are read."""
        return self.forward or self.finished


@dataclass
class Tape:
    """A recorded call of a pipeline.

    One that was stopped has the component calls of the step it was stopped at, but not the step. `probe` is the tape of
    the same call for one sample (for two, where this has only one), stopped at the first step: it shows where the batch
    dimension of each value is. Needed only to replay sub-batches and to branch. `reads` is set if it is compacted.
    """

    call: dict[str, object]
    batch_size: int
    steps: list[TapeStep] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    component_calls: list[ComponentCall] = field(default_factory=list)
    companions: list[SecondaryStep] = field(default_factory=list)
    probe: Tape | None = None
    reads: RequiredTensors | None = None

    @property
    def stochastic_steps(self) -> list[int]:
        """Indices of the stochastic steps, which have a log-probability."""
        return [k for k, step in enumerate(self.steps) if step.log_prob is not None]

    def overwritten(self, k: int) -> torch.Tensor | None:
        """Mask of the latents after step `k` that the pipeline overwrites, `[B, ...]` bool: they reach no image.

        An inpainting pipeline sets what surrounds the opening of its mask after each step. Of the last one nothing is
        recorded: there it is what was written over before it. None: nothing, or all, as by a callback that scales the
        latents.
        """
        following = self.steps[min(k + 1, len(self.steps) - 1)].written
        if following is not None and following.is_meta:
            raise ReplayError(f"what the pipeline overwrote after step {k} was not kept in this compacted tape")
        return None if following is None or bool(following.all()) else following

    def looped_components(self) -> set[str]:
        """Names of the components that are called in the denoising loop, not only before it.

        The last call before the first step is the loop's own: an expert for high noise may be called nowhere else.
        """
        inside = {c.component for c in self.component_calls if c.step > 0}
        first = [c.component for c in self.component_calls if c.step == 0]
        return inside | set(first[-1:]) if inside else set(first)

    def live_at(self, steps: Iterable[int]) -> set[int]:
        """The steps at which the denoiser has to run where `steps` are trained.

        Two scheduler streams may share one denoiser call: a step is served by the last call before it.
        """
        looped = self.looped_components()
        called = {c.step for c in self.component_calls if c.component in looped}
        return {max(before) for k in steps if (before := [c for c in called if c <= k])}

    def companion(self, position: int, sample: torch.Tensor) -> SecondaryStep:
        """Step `position` of the secondary modality; raises `ReplayError` where it does not start at `sample`."""
        recorded = self.companions[position] if position < len(self.companions) else None
        if recorded is None or recorded.x.shape != sample.shape:
            raise ReplayError("the pipeline steps a second modality, which it did not in the rollout")
        if not torch.equal(recorded.x.to(sample.dtype), sample):
            raise ReplayError(
                f"the latents of the second modality differ from the recorded ones after step {recorded.step - 1}: "
                "the pipeline cannot be replayed"
            )
        return recorded

    def rows(self, index: Sequence[int]) -> Tape:
        """Select the samples `index`, repeats allowed; the result can be replayed, branched and pickled by itself.

        Latents that steps share stay shared. Raises `ReplayError` where there is no probe to show the batch dimensions.
        """
        if tuple(index) == tuple(range(self.batch_size)):
            return self
        if self.probe is None or self.probe.batch_size == self.batch_size:
            raise ReplayError("replaying a sub-batch needs a tape recorded with probe=True")
        if self.batch_size == 1:
            return self._rows(index, self.start())
        # a tape of one sample shows nothing by comparison with one sample
        alike = self.probe if len(index) > 1 else self.start()._rows([*index, *index], None)
        return self._rows(index, alike)

    def start(self) -> Tape:
        """Shapes of what was recorded before the first step: the probe for other numbers of samples."""
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
        picked: dict[int, torch.Tensor] = {}  # by id: the latents after a step are those before the next

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
            # past the probe's end (later loops of a long pipeline) the last value of that name shows where rows are
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
        )


# --- The modality that goes along with the trained one (the sound of a video), answered from a tape


class SecondaryFromTape:
    """The part of a head that answers the steps of a secondary modality from a tape; see `hooks.Head`."""

    tape: Tape
    accompanied = 0  # steps handed out so far

    def on_secondary_step(
        self, scheduler: SchedulerMixin, model_output: torch.Tensor, timestep: Timestep, sample: torch.Tensor
    ) -> torch.Tensor:
        """The latents after the step, fp32; raises `ReplayError` where `sample` are not those recorded before it."""
        del model_output
        recorded = self.tape.companion(self.accompanied, sample)
        self.accompanied += 1
        advance(scheduler, timestep)
        return recorded.x_next
