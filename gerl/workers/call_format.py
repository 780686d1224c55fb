"""Whether a pipeline accepts a list of prompts, one prompt per call, or one prompt as a plain string.

Pipelines disagree, and tell only by an error: the formats are tried in this order on the first call. Where memory does
not hold a batch, later calls have half as many samples.
"""

from __future__ import annotations  # of diffusers, which the driver of a run does without

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

from gerl.model.errors import CallRefused, is_full, release
from gerl.protocol import RolloutTask, Segment

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

logger = logging.getLogger(__name__)
T = TypeVar("T")
# what pipelines raise for arguments that they do not take, also where gerl calls on their behalf
REFUSALS = (CallRefused, ValueError, RuntimeError, IndexError, TypeError, AttributeError)


@dataclass(frozen=True)
class CallFormat:
    """How samples are passed to a pipeline.

    Example: `CallFormat(most=1, text=True)` calls it once per sample, with the prompt as a string.
    """

    most: int | None = None  # samples per call; None: all
    text: bool = False  # the prompt as a string, for a pipeline that takes no list

    def of(self, count: int) -> int:
        """Number of samples per call, of `count` in all."""
        return min(self.most or count, count)

    def arguments(self, call: Mapping[str, object]) -> dict[str, object]:
        """The keyword arguments `call`, whose prompts are lists, in this format."""
        if not self.text:
            return dict(call)
        return {
            name: value[0] if "prompt" in name and isinstance(value, list) and len(value) == 1 else value
            for name, value in call.items()
        }


TOGETHER = CallFormat()
FORMATS = (TOGETHER, CallFormat(1), CallFormat(1, text=True))


Smaller = Callable[[int], int]


def half(size: int) -> int:
    """Half of `size`, rounded up."""
    return -(-size // 2)


@dataclass
class CallFormatFinder:
    """Finds the format that a pipeline accepts, and a batch size that fits into memory.

    They are kept per purpose (rollout, validation): guidance may be on in one of them only, and change the format.
    """

    pipe: DiffusionPipeline
    say: Callable[[str], None] = logger.warning  # told when a batch is split because memory is full
    divides: bool = True  # whether batches may be split
    found: dict[str, CallFormat] = field(default_factory=dict)

    def attempt(self, purpose: str, count: int, sample: Callable[[CallFormat], T], smaller: Smaller | None = half) -> T:
        """Call `sample` for `count` samples in the first format that the pipeline accepts.

        Raises the first refusal if it accepts none. `smaller`: maps a batch size that does not fit into memory to the
        next one to try; None: there is none.
        """
        while True:
            try:
                return self._attempt(purpose, count, sample)
            except (MemoryError, RuntimeError) as error:
                form = self.found.get(purpose, TOGETHER)
                size = form.of(count)
                if not (is_full(error) and self.divides and smaller is not None and size > 1):
                    raise
                release(error)
            self.found[purpose] = replace(form, most=smaller(size))
            self.say(
                f"out of memory in the {purpose} of {size} images: continuing with "
                f"{purpose}.micro_batch_size={smaller(size)}; set it to skip this search"
            )

    def _attempt(self, purpose: str, count: int, sample: Callable[[CallFormat], T]) -> T:
        if purpose in self.found:
            return sample(self.found[purpose])
        refused: Exception | None = None
        for form in FORMATS if count > 1 else (TOGETHER, FORMATS[-1]):
            try:
                result = sample(form)
            except REFUSALS as error:
                if is_full(error):
                    raise
                if refused is not None and str(error) != str(refused):
                    logger.info("%s, one prompt per call: %s", type(self.pipe).__name__, error)
                refused = refused or error
                continue
            if count > 1 or form.text:  # that one sample works says nothing of several
                self.found[purpose] = form
            if form.most is not None:
                logger.info("%s takes one prompt per call: samples are generated one by one", type(self.pipe).__name__)
            return result
        assert refused is not None
        raise refused


def divided(task: RolloutTask, most: int | None) -> RolloutTask:
    """Split the segments of `task` into ones of at most `most` rows, in the same order; a tree's into single rows."""
    if most is None or all(len(segment.seeds) <= most for segment in task.segments):
        return task
    if len(task.segments) == 1:
        (whole,) = task.segments
        parts = [slice(i, i + most) for i in range(0, len(whole.seeds), most)]
        found = tuple(replace(whole, seeds=whole.seeds[part], leaves=whole.leaves[part]) for part in parts)
        return replace(task, segments=found)
    segments: list[Segment] = []
    places: list[list[int]] = []  # by segment of `task`: where each of its rows is among the new ones
    for segment in task.segments:
        places.append([len(segments) + r for r in range(len(segment.seeds))])
        for r, (seed, leaf) in enumerate(zip(segment.seeds, segment.leaves, strict=True)):
            alone = replace(segment, seeds=(seed,), leaves=(leaf,))
            if segment.parent is not None:
                alone = replace(alone, parent=places[segment.parent][segment.rows[r]], rows=(0,))
            segments.append(alone)
    return replace(task, segments=tuple(segments))
