"""The weights that draw, on their way from workers that train to workers that only draw (cluster.layout=split)."""

from __future__ import annotations  # of diffusers, which the driver of a run does without

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from gerl.model.shards import local

if TYPE_CHECKING:
    from gerl.model.policy import Policy

TRAINED = "trained"


@dataclass(frozen=True)
class Weights:
    """The weights that a policy draws with: those trained and averages of them, each as one fp32 vector.

    Of divided weights it is the part of one rank.
    """

    flat: dict[str, np.ndarray]  # by name of the average
    version: int
    updates: dict[str, int]  # of each average
    old_is_current: bool


def weights_of(policy: Policy, earlier: bool) -> Weights:
    """A copy of what `policy` draws with; `earlier`: with the weights of earlier steps."""
    averages = {name: a for name, a in policy.averages().items() if earlier or not name.startswith("earlier")}
    averages.pop("reference", None)  # nothing is drawn with it
    flat = {name: _flat(average.average.values()) for name, average in averages.items()}
    updates = {name: average.updates for name, average in averages.items()}
    return Weights(flat | {TRAINED: _flat(policy.trained.values())}, policy.version, updates, policy.old_is_current)


@torch.no_grad()
def take_weights(policy: Policy, weights: Weights) -> None:
    """Let `policy` draw with `weights`, as that policy does of which they are."""
    averages = policy.averages()
    for name, updates in weights.updates.items():
        _fill(averages[name].average.values(), weights.flat[name])
        averages[name].updates = updates
    _fill(policy.trained.values(), weights.flat[TRAINED])
    policy.version, policy.old_is_current = weights.version, weights.old_is_current


def _flat(tensors: Iterable[torch.Tensor]) -> np.ndarray:
    return torch.cat([local(tensor.detach()).flatten() for tensor in tensors]).to("cpu", copy=True).numpy()


def _fill(tensors: Iterable[torch.Tensor], flat: np.ndarray) -> None:
    """Write `flat` into `tensors`, whose sizes add up to its size."""
    places = [local(tensor) for tensor in tensors]
    values = torch.from_numpy(flat.copy())  # what comes out of Ray's store is not to be written
    for place, part in zip(places, values.split([place.numel() for place in places]), strict=True):
        place.copy_(part.view_as(place))
