"""Assign micro-batches to processes; ranks in lockstep all make the same calls of the model.

Ranks of a worker hold parts of the weights (model.shard) or of the tokens of a call (cluster.context) and exchange them
in every call, so a rank with nothing left to sample repeats another one's micro-batch as padding.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby

from gerl.config import Config
from gerl.protocol import RolloutTask, Segment
from gerl.workers.rollout import shared_prefixes


@dataclass(frozen=True)
class Placement:
    """The process of each of M micro-batches, and in lockstep the groups that are processed at the same time.

    Example: five micro-batches of one kind on two workers of two ranks are the lockstep groups `[[0, 1], [2, 3], [4]]`
    on the processes `[0, 1, 2, 3, 0]`; process 1 repeats micro-batch 4.
    """

    processes: list[int]  # [M]
    groups: list[list[int]] = field(default_factory=list)  # micro-batches processed at the same time; lockstep only
    padding: list[tuple[int, int]] = field(default_factory=list)  # (micro-batch, process that repeats it)
    context: int = 1  # processes that share the tokens of a call: the one in `processes` and those after it

    def peers(self, number: int) -> range:
        """The processes that share the tokens of micro-batch `number` with its own."""
        first = self.processes[number]
        return range(first + 1, first + self.context)

    def padded(self, number: int) -> list[int]:
        """The processes that repeat micro-batch `number` as padding."""
        return self._padded.get(number, [])

    def copies_after(self, number: int) -> Iterator[tuple[int, int, bool]]:
        """The further calls after micro-batch `number`: (micro-batch, process, whether it is padding).

        Context-parallel peers make the same call; padding follows the last micro-batch of a lockstep group.
        """
        yield from ((number, process, False) for process in self.peers(number))
        first = self._firsts.get(number)
        if first is not None:
            yield from ((first, process, True) for process in self.padded(first))

    @cached_property
    def _firsts(self) -> dict[int, int]:
        """Last micro-batch of a lockstep group -> its first, which is repeated."""
        return {members[-1]: members[0] for members in self.groups}

    @cached_property
    def _padded(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for number, process in self.padding:
            found.setdefault(number, []).append(process)
        return found


def place(kinds: Sequence[Hashable], config: Config, processes: int) -> Placement:
    """Assign micro-batches to `processes` by their `kinds`, which are equal where they need the same calls."""
    if not config.lockstep:
        return Placement([i % processes for i in range(len(kinds))])
    ranks, context, found = config.lockstep_ranks, config.cluster.context, Placement([], context=config.cluster.context)
    for _, alike in groupby(range(len(kinds)), key=lambda i: kinds[i]):
        members = list(alike)
        for start in range(0, len(members), ranks // context):
            chosen = members[start : start + ranks // context]
            first = len(found.groups) * ranks % processes  # the first of the ranks in lockstep
            idle = first + len(chosen) * context
            found.groups.append(chosen)
            found.processes.extend(range(first, idle, context))
            found.padding.extend((chosen[0], process) for process in range(idle, first + ranks))
    return found


def call_pattern(task: RolloutTask) -> Hashable:
    """Equal for tasks that make the same calls of the model.

    That depends on their segments, the rows and trained steps of each, and on whether rows share a prefix, which is
    probed once with a pipeline that cannot branch.
    """

    def shares(s: Segment) -> bool:
        return s.parent is None and len(shared_prefixes([task.samples[leaf] for leaf in s.leaves])[0]) < len(s.leaves)

    return tuple(
        (len(s.seeds), s.parent, s.start, s.stop, len(s.window), len(s.trained), shares(s)) for s in task.segments
    )
