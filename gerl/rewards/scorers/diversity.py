"""Diversity: how unlike the other images of its prompt an image is, against the collapse to one picture per prompt."""

from dataclasses import dataclass

import torch
from PIL import Image

from gerl.rewards.scorers.base import Metadata
from gerl.rewards.scorers.clip_tower import ClipScorer


@dataclass(frozen=True, kw_only=True)
class Diversity(ClipScorer):
    """1 - the mean cosine of an image's CLIP feature with those of the other images of its group, in [0, 2].

    0 for an image without others, as in validation. `nearest`: 1 - the largest cosine in place of the mean one, as
    GARDO measures it (arXiv 2512.24138; there with DINOv3).
    """

    nearest: bool = False
    groupwise = True

    def __call__(self, images: list[Image.Image], prompts: list[str], metadata: list[Metadata]) -> list[float]:
        features = self.tower.image_features(images, self.batch_size)
        distances = (1 - features @ features.T).fill_diagonal_(0)
        if self.nearest and len(images) > 1:
            return distances.fill_diagonal_(torch.inf).min(1).values.tolist()
        return (distances.sum(1) / max(len(images) - 1, 1)).tolist()
