"""Diffusion-KTO (arXiv 2404.04465): liked and disliked images, without pairs.

The policy should fit liked images better than the base model does, and disliked ones worse, relative to how much better
it fits images on average:

    g = mse_ref - mse,    z = max(0, mean of g),    L = w (1 - sigmoid(y beta (g - z))),    y = +-1, liked or not

z is a constant, the mean over all images and noise levels of the update. At the reference L is w / 2, and its
derivative by mse is y w beta / 4. The sigmoid bounds the contribution of an image, so some labels may be wrong.
"""

from __future__ import annotations  # torch is imported lazily

import math
from dataclasses import dataclass

from gerl.algorithms.base import Pooled, Rewards, Sums
from gerl.algorithms.common import per_sample, requires
from gerl.algorithms.core_algos import Metrics
from gerl.algorithms.forward_process import ForwardProcess, ForwardProcessConfig, Noised
from gerl.algorithms.lazily import torch
from gerl.config import Config
from gerl.config.schema import key
from gerl.protocol import Sample


@requires(base_model=True, single_images=True)
@dataclass(frozen=True)
class KTOConfig(ForwardProcessConfig):
    """The keys of KTO."""

    beta: float = key(1000.0, "sharpness of preferences", above=0)
    weight_liked: float = key(1.0, "weight of images that are liked, or above the mean of their group", low=0)
    weight_disliked: float = key(1.0, "weight of the others", low=0)


class KTO(ForwardProcess):
    """Credit +1 for liked images, -1 for disliked ones; of several, those above and below their mean; NaN at it."""

    names = "kto"
    settings: KTOConfig

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.pools = True  # a first pass computes z

    def advantages(self, rewards: Rewards) -> torch.Tensor:
        ids, totals = rewards.group_ids, rewards.totals.double()
        counts = ids.bincount()
        means = totals.new_zeros(len(counts)).index_add(0, ids, totals) / counts
        excess = torch.where(counts[ids] == 1, totals, totals - means[ids])
        near = excess.abs() <= 1e-9 * totals.abs().max()
        return torch.where(near, torch.nan, excess.sign()).to(rewards.totals.dtype)

    def loss(self, s: Noised) -> tuple[torch.Tensor, Metrics]:
        """Return the loss L of the module docstring, `preference_margin` (the mean of y g) and `fit_margin` (z)."""
        better = self._better(s)
        mean = better.detach().mean().expand_as(better) if s.pooled is None else s.pooled[0] / s.pooled[1]
        margin, liked = mean.clamp(min=0), s.advantages > 0
        weights = torch.where(liked, self.settings.weight_liked, self.settings.weight_disliked)
        losses = weights * (1 - (s.advantages.sign() * self.settings.beta * (better - margin)).sigmoid())
        preferred = (s.advantages.sign() * better.detach()).mean()
        return losses, {"preference_margin": preferred, "fit_margin": margin.mean()}

    def pooled(self, s: Noised) -> torch.Tensor:
        return self._better(s).detach()

    def sums(self, pooled: Pooled, samples: list[Sample], level: int, like: torch.Tensor) -> Sums:
        """Return the sum of g over all images and noise levels of the update, and their number."""
        del samples, level
        total = math.fsum(value for value, _ in pooled.values())
        count = float(sum(number for _, number in pooled.values()))
        return torch.full_like(like, total), torch.full_like(like, count)

    def _better(self, s: Noised) -> torch.Tensor:
        """Return g [B]: by how much the policy fits better than the base model."""
        assert s.reference is not None
        target = s.target
        return per_sample((s.reference - target) ** 2) - per_sample((s.output - target) ** 2)
