"""Groups that people are asked about: what each was drawn for, and when they are asked about it again."""

import hashlib
import json
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

from gerl.cluster import Pending, wait_any
from gerl.protocol import Group, Occasion, Prompt

logger = logging.getLogger(__name__)
SOON, LATE, GROWTH = 0.05, 1.0, 1.5  # seconds until the second time, and at most, and from one to the next


class Scorable(Protocol):
    """An image that is to be scored: a `Sample`, or anything with these."""

    @property
    def prompt(self) -> Prompt: ...

    @property
    def group(self) -> Group: ...

    @property
    def seed(self) -> int: ...

    @property
    def step(self) -> int: ...


class Asked(Protocol):
    """A call that people have not answered yet, how often that was so, and when it is made again."""

    scorer: str
    polls: int
    wake: float


A = TypeVar("A", bound=Asked)


class Asleep(list[A]):
    """Calls that wait for people; they cost nothing but a short call now and then."""

    said: str = ""  # what was wrong the last time

    def put(self, call: A, said: str) -> None:
        """Let a call wait; log `said` where it is something else than the last time."""
        call.wake = time.perf_counter() + min(LATE, SOON * GROWTH ** min(call.polls, 20))
        call.polls += 1
        self.append(call)
        if said != self.said:
            logger.warning("scorer %s: %s", call.scorer, said or "people can be asked again")
            self.said = said

    def awake(self) -> list[A]:
        """Take out those that are to be made again."""
        now = time.perf_counter()
        found = [call for call in self if call.wake <= now]
        self[:] = [call for call in self if call.wake > now]
        return found


def wait(pending: Sequence[Pending[Any]], seconds: float | None) -> set[Pending[Any]]:
    """Those of the `pending` calls that have ended, when one has or so many seconds are over."""
    if not pending and seconds is not None:  # nothing but people is waited for
        time.sleep(seconds)
    return set(wait_any(pending, seconds))


def occasions(run: str, groups: Mapping[Group, Sequence[Scorable]]) -> dict[Group, Occasion]:
    """The origin of each of the groups that are scored together."""
    keys = {}
    for group, members in groups.items():
        named = [run, members[0].step, *group, [sample.seed for sample in members]]
        keys[group] = hashlib.sha256(json.dumps(named).encode()).hexdigest()[:16]
    together = tuple(keys.values())
    return {
        group: Occasion(
            keys[group], run, members[0].step, group.prompt, tuple(sample.seed for sample in members), together
        )
        for group, members in groups.items()
    }
