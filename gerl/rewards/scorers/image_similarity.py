"""Likeness of the drawn image to a reference image, for editing and for drawing a given subject.

Source: the CLIP-I metric of "DreamBooth" (arXiv 2208.12242), section 4.2.
"""

from dataclasses import dataclass

import torch
from PIL import Image

from gerl.rewards.scorers.base import Metadata
from gerl.rewards.scorers.clip_tower import ClipScorer
from gerl.rewards.scorers.references import features_of, reference_of

NAME = "image_similarity"


@dataclass(frozen=True, kw_only=True)
class ImageSimilarity(ClipScorer):
    """Cosine of the CLIP features of image and reference, in [-1, 1], 1 for the reference itself.

    The reference is the row's `metadata_key`: a path, absolute or from the current directory, or a PIL image.
    """

    metadata_key: str = "image"

    def __call__(self, images: list[Image.Image], prompts: list[str], metadata: list[Metadata]) -> list[float]:
        references = [
            reference_of(NAME, prompt, row, self.metadata_key) for prompt, row in zip(prompts, metadata, strict=True)
        ]

        def features(pictures: list[Image.Image]) -> torch.Tensor:
            return self.tower.image_features(pictures, self.batch_size)

        return (features(images) * features_of(references, features)).sum(-1).tolist()

    def check_prompt(self, prompt: str, metadata: Metadata) -> None:
        reference_of(NAME, prompt, metadata, self.metadata_key)
