"""How a pipeline takes the samples of a task: all in one call, one a call, or one a call with its prompt as a text.

Pipelines disagree about it, and say so only by an error. The ways are tried in this order on the first call.
"""

from __future__ import annotations  # of diffusers, which the driver of a run does without

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

from gerl.model.failures import CallRefused, is_full
from gerl.protocol import RolloutTask, Segment

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

logger = logging.getLogger(__name__)
T = TypeVar("T")
# what pipelines raise for arguments that they do not take, also where gerl calls on their behalf
REFUSALS = (CallRefused, ValueError, RuntimeError, IndexError, TypeError, AttributeError)


@dataclass(frozen=True)
class Way:
    """`together`: all samples in one call. `text`: the prompt as a string, for a pipeline that takes no list."""

    together: bool = True
    text: bool = False

    def arguments(self, call: Mapping[str, object]) -> dict[str, object]:
        """`call`, whose prompts are lists, as the pipeline takes it."""
        if not self.text:
            return dict(call)
        return {
            name: value[0] if "prompt" in name and isinstance(value, list) and len(value) == 1 else value
            for name, value in call.items()
        }


TOGETHER = Way()
WAYS = (TOGETHER, Way(together=False), Way(together=False, text=True))


@dataclass
class Ways:
    """The ways that were found, by purpose: guidance may be on in validation only, where a pipeline stops for it."""

    pipe: DiffusionPipeline
    found: dict[str, Way] = field(default_factory=dict)

    def attempt(self, purpose: str, count: int, draw: Callable[[Way], T]) -> T:
        """`draw` of `count` samples in the first way that the pipeline does not refuse; the first refusal otherwise."""
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
                    logger.info("%s, one prompt a call: %s", type(self.pipe).__name__, error)
                refused = refused or error
                continue
            if count > 1 or way.text:  # that one sample can be drawn says nothing of several
                self.found[purpose] = way
            if not way.together:
                logger.info("%s takes one prompt a call: samples are drawn one by one", type(self.pipe).__name__)
            return drawn
        assert refused is not None
        raise refused


def one_by_one(task: RolloutTask) -> RolloutTask:
    """`task` with a segment for each row, in the same order."""
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
