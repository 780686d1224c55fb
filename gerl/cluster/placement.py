"""Placement of a worker's ranks on one node if it has room for them, by Ray's placement groups."""

from collections.abc import Mapping, Sequence

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from gerl.cluster import health
from gerl.errors import ClusterError

PATIENCE = 5.0  # seconds in which Ray creates a group that fits
TOGETHER = ("STRICT_PACK", "PACK")  # on one node, else on as few as possible


class Places:
    """Placement groups for processes that take `share` of Ray's resources each: one group for all, or one per few."""

    def __init__(
        self, name: str, count: int, share: Mapping[str, float], together: int, strategies: Sequence[str] = TOGETHER
    ) -> None:
        """Create groups of `together` consecutive processes. Raises `ClusterError` in seconds without room."""
        self.share, self.together, self.strategies = dict(share), together, strategies
        self._groups: dict[int, PlacementGroup] = {}
        for number in range(count // together):
            label = name if together == count and strategies is not TOGETHER else f"{name} {number}"
            self._groups[number] = self._place(label)

    def of(self, process: int) -> PlacementGroupSchedulingStrategy:
        """Return the placement of a process; requests released room again without waiting."""
        number, index = divmod(process, self.together)
        if number not in self._groups:
            self._groups[number] = placement_group([self.share] * self.together, strategy=self.strategies[-1])
        return PlacementGroupSchedulingStrategy(self._groups[number], index)

    def has_room(self, process: int) -> bool:
        """Whether the placement group of a process is created; the process may still be starting."""
        group = self._groups.get(process // self.together)
        return group is not None and placement_group_table(group)["state"] == "CREATED"

    def give_back(self, process: int) -> None:
        """Release the placement group of a process."""
        if group := self._groups.pop(process // self.together, None):
            remove_placement_group(group)

    def close(self) -> None:
        """Release all placement groups; those of a dead Ray are gone already."""
        for number in list(self._groups) if health.lives() else ():
            self.give_back(number * self.together)

    def forget(self) -> None:
        """Forget all placement groups of a dead Ray."""
        self._groups.clear()

    def _place(self, label: str) -> PlacementGroup:
        for strategy in self.strategies:
            group = placement_group([self.share] * self.together, strategy=strategy)
            if group.wait(PATIENCE):
                return group
            remove_placement_group(group)
        sentence = no_room(label, self.share, self.together)
        raise ClusterError(f"{sentence}; lower cluster.num_workers or cluster.ranks_per_worker")


def no_room(name: str, share: Mapping[str, float], count: int = 1) -> str:
    """Describe the resources requested by `count` processes with `share` each, and the free ones."""
    asked = " and ".join(f"{value:g} {key}" for key, value in share.items())
    free = ray.available_resources()
    left = " and ".join(f"{free.get(key, 0.0):g} {key}" for key in share)
    nodes = sum(node["Alive"] for node in ray.nodes())
    return (
        f"Ray has no room for {name}, {count} process{'es' if count > 1 else ''} of {asked}: free are {left} on "
        f"{nodes} nodes"
    )
