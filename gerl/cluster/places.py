"""Where processes run: the ranks of a worker together on a node if one has room for them, by Ray's placement groups."""

from collections.abc import Sequence

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from gerl.errors import ClusterError

PATIENCE = 5.0  # seconds in which Ray finds room that is there
TOGETHER = ("STRICT_PACK", "PACK")  # on one node, or, where none has room for all of them, on as few as possible


def place_group(name: str, ranks: int, share: dict[str, float], strategies: Sequence[str] = TOGETHER) -> PlacementGroup:
    """Room for `ranks` processes that take `share` of Ray's resources each, by the first strategy that finds it.

    Raises `ClusterError` within seconds if there is none.
    """
    for strategy in strategies:
        group = placement_group([share] * ranks, strategy=strategy)
        if group.wait(PATIENCE):
            return group
        remove_placement_group(group)
    asked = " and ".join(f"{value:g} {key}" for key, value in share.items())
    free = ray.available_resources()
    left = " and ".join(f"{free.get(key, 0.0):g} {key}" for key in share)
    raise ClusterError(
        f"Ray has no room for {name}, {ranks} process{'es' if ranks > 1 else ''} of {asked}: free are {left} on "
        f"{sum(node['Alive'] for node in ray.nodes())} nodes; lower cluster.num_workers or cluster.ranks_per_worker"
    )
