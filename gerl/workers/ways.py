"""How a pipeline takes the samples of a task: all in one call, one a call, or one a call with its prompt as a text.

Pipelines disagree about it, and say so only by an error. The ways are tried in this order on the first call. Where the
memory does not hold a call, those that follow have half as many samples.
"""

from __future__ import annotations  # of diffusers, which the driver of a run does without

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

from gerl.model.failures import CallRefused, is_full, release
from gerl.protocol import RolloutTask, Segment

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

logger = logging.getLogger(__name__)
T = TypeVar("T")
# what pipelines raise for arguments that they do not take, also where gerl calls on their behalf
REFUSALS = (CallRefused, ValueError, RuntimeError, IndexError, TypeError, AttributeError)


@dataclass(frozen=True)
class Way:
    """`most`: samples in one call; None: all. `text`: the prompt as a string, for a pipeline that takes no list."""

    most: int | None = None
    text: bool = False

    def of(self, count: int) -> int:
        """Samples of one call where there are `count`."""
        return min(self.most or count, count)

    def arguments(self, call: Mapping[str, object]) -> dict[str, object]:
        """`call`, whose prompts are lists, as the pipeline takes it."""
        if not self.text:
            return dict(call)
        return {
            name: value[0] if "prompt" in name and isinstance(value, list) and len(value) == 1 else value
            for name, value in call.items()
        }


TOGETHER = Way()
WAYS = (TOGETHER, Way(1), Way(1, text=True))


Smaller = Callable[[int], int]


def half(size: int) -> int:
    return -(-size // 2)


@dataclass
class Ways:
    """The ways that were found, by purpose: guidance may be on in validation only, where a pipeline stops for it."""

    pipe: DiffusionPipeline
    say: Callable[[str], None] = logger.warning  # where samples are divided because the memory is full
    divides: bool = True  # whether they may be
    found: dict[str, Way] = field(default_factory=dict)

    def attempt(self, purpose: str, count: int, draw: Callable[[Way], T], smaller: Smaller | None = half) -> T:
        """`draw` of `count` samples in the first way that the pipeline does not refuse; the first refusal otherwise.

        `smaller`: the samples of a call where the memory does not hold one of so many; None: there is nothing smaller.
        """
        while True:
            try:
                return self._attempt(purpose, count, draw)
            except (MemoryError, RuntimeError) as error:
                way = self.found.get(purpose, TOGETHER)
                size = way.of(count)
                if not (is_full(error) and self.divides and smaller is not None and size > 1):
                    raise
                release(error)
            self.found[purpose] = replace(way, most=smaller(size))
            self.say(
                f"not enough memory for the {purpose} of {size} images: {smaller(size)} at a time from here on; "
                f"set {purpose}.micro_batch_size to that to skip this search"
            )

    def _attempt(self, purpose: str, count: int, draw: Callable[[Way], T]) -> T:
        if purpose in self.found:
            return draw(self.found[purpose])
        refused: Exception | None = None
        for way in WAYS if count > 1 else (TOGETHER, WAYS[-1]):
            try:
                drawn = draw(way)
            except REFUSALS as error:
                if is_full(error):
                    raise
                if refused is not None and str(error) != str(refused):
                    logger.info("%s, one prompt per call: %s", type(self.pipe).__name__, error)
                refused = refused or error
                continue
            if count > 1 or way.text:  # that one sample can be drawn says nothing of several
                self.found[purpose] = way
            if way.most is not None:
                logger.info("%s takes one prompt per call: samples are generated one by one", type(self.pipe).__name__)
            return drawn
        assert refused is not None
        raise refused


def divided(task: RolloutTask, most: int | None) -> RolloutTask:
    """`task` with segments of at most `most` rows, in the same order; of a tree with one row each, if any has more."""
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
