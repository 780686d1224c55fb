"""CLIPScore: how well an image fits its prompt.

Source: "CLIPScore: A Reference-free Evaluation Metric for Image Captioning" (arXiv 2104.08718), without its clipping at
0; the scale is that of Flow-GRPO (arXiv 2505.05470), whose own resizing of the image differs from CLIP's by a little.
"""

from dataclasses import dataclass

import torch
from PIL import Image

from gerl.rewards.scorers.base import Metadata
from gerl.rewards.scorers.clip_tower import ClipScorer

SCALE = 30.0


@dataclass(frozen=True, kw_only=True)
class ClipScore(ClipScorer):
    """exp(logit_scale) * cosine(image, prompt) / 30, about 0.5 to 1.2; with `raw` the cosine, in [-1, 1]."""

    raw: bool = False

    differentiable = True

    def __call__(self, images: list[Image.Image], prompts: list[str], metadata: list[Metadata]) -> list[float]:
        return (self.cosines(images, prompts) * self.factor).tolist()

    def tensor_scores(self, images: torch.Tensor, prompts: list[str], metadata: list[Metadata]) -> torch.Tensor:
        return self.tensor_cosines(images, prompts) * self.factor

    @property
    def factor(self) -> float:
        """Of the cosine in the score."""
        return 1.0 if self.raw else self.tower.logit_scale / SCALE
