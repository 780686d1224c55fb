"""PickScore: how likely people are to prefer an image for its prompt.

Source: "Pick-a-Pic: An Open Dataset of User Preferences for Text-to-Image Generation" (arXiv 2305.01569), section 4;
the division by 26, near the mean score of good images, is Flow-GRPO's (arXiv 2505.05470).
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from PIL import Image
from pydantic import Field

from gerl.rewards.scorers.base import Metadata
from gerl.rewards.scorers.clip_tower import ClipScorer


@dataclass(frozen=True, kw_only=True)
class PickScore(ClipScorer):
    """exp(logit_scale) * cosine(image, prompt) / `scale`, about 0.7 to 0.9; scale=1 is the score of the paper."""

    model: str = "yuvalkirstain/PickScore_v1"
    processor: str | None = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
    scale: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 26.0

    differentiable = True

    def __call__(self, images: list[Image.Image], prompts: list[str], metadata: list[Metadata]) -> list[float]:
        return (self.cosines(images, prompts) * (self.tower.logit_scale / self.scale)).tolist()

    def tensor_scores(self, images: torch.Tensor, prompts: list[str], metadata: list[Metadata]) -> torch.Tensor:
        return self.tensor_cosines(images, prompts) * (self.tower.logit_scale / self.scale)
