"""Where the ranks of a worker run: together on a node if one has room for them, by a placement group of Ray each."""

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from gerl.errors import ClusterError

PATIENCE = 5.0  # seconds in which Ray finds room that is there


def place_group(name: str, ranks: int, share: dict[str, float]) -> PlacementGroup:
    """Room for `ranks` processes that take `share` of Ray's resources each.

    On one node, or, where none has room for all of them, on as few as possible. Raises `ClusterError` within seconds if
    there is none.
    """
    for strategy in ("STRICT_PACK", "PACK"):
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
