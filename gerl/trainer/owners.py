"""Which process draws which micro-batch, so that the ranks of a worker call the model equally often where they must."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby

from gerl.config import Config
from gerl.protocol import RolloutTask, Segment
from gerl.workers.beginnings import beginnings


@dataclass(frozen=True)
class Owners:
    """The process of each micro-batch.

    In lockstep the micro-batches are in sets, one for each rank of a worker, of which all make the same calls; where
    ranks share tokens (cluster.context) one for each first of such ranks, whom the others follow. Where there are too
    few of a kind for a set, ranks repeat the set's first one, and nothing comes of it.
    """

    processes: list[int]  # [M]
    sets: list[list[int]] = field(default_factory=list)  # of micro-batches drawn at the same time, in lockstep only
    repeats: list[tuple[int, int]] = field(default_factory=list)  # (micro-batch, process that repeats it)

    def repeated_after(self, number: int) -> list[tuple[int, int]]:
        """The repetitions in the set that micro-batch `number` is the last one of."""
        first = self._firsts.get(number)
        return [] if first is None else [(first, process) for process in self.repeated_by(first)]

    def repeated_by(self, number: int) -> list[int]:
        """The processes that repeat micro-batch `number`."""
        return self._repeating.get(number, [])

    @cached_property
    def _firsts(self) -> dict[int, int]:
        """Last micro-batch of a set -> the first one of it."""
        return {members[-1]: members[0] for members in self.sets}

    @cached_property
    def _repeating(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for number, process in self.repeats:
            found.setdefault(number, []).append(process)
        return found


def share(kinds: Sequence[Hashable], config: Config, processes: int) -> Owners:
    """The owners of micro-batches by their `kinds`, which are equal where they need the same calls of the model."""
    if not config.lockstep:
        return Owners([i % processes for i in range(len(kinds))])
    ranks, context, found = config.lockstep_ranks, config.cluster.context, Owners([])
    for _, alike in groupby(range(len(kinds)), key=lambda i: kinds[i]):
        members = list(alike)
        for start in range(0, len(members), ranks // context):
            chosen = members[start : start + ranks // context]
            first = len(found.sets) * ranks % processes  # the first of the ranks in lockstep
            idle = first + len(chosen) * context
            found.sets.append(chosen)
            found.processes.extend(range(first, idle, context))
            found.repeats.extend((chosen[0], process) for process in range(idle, first + ranks))
    return found


def followers(owner: int, config: Config) -> range:
    """The processes that share the tokens of calls with `owner`, and have to make all of them with it."""
    return range(owner + 1, owner + config.cluster.context)


def kind(task: RolloutTask) -> Hashable:
    """Equal for tasks that need the same calls: their segments, the rows and trained steps of each, and if some of the
    rows begin alike, which a pipeline that cannot be branched tries once."""

    def alike(s: Segment) -> bool:
        return s.parent is None and len(beginnings([task.samples[leaf] for leaf in s.leaves])[0]) < len(s.leaves)

    return tuple(
        (len(s.seeds), s.parent, s.start, s.stop, len(s.window), len(s.trained), alike(s)) for s in task.segments
    )
