"""Rewards from the size of the image as a JPEG file: no model, so ideal for a first try.

Source: "Training Diffusion Models with Reinforcement Learning" (DDPO, arXiv 2305.13301); the scales are those of
Flow-GRPO's reward code.
"""

import io
from dataclasses import dataclass
from typing import Annotated

from PIL import Image
from pydantic import Field

from gerl.rewards.scorers.base import Metadata, Scorer


def jpeg_kilobytes(image: Image.Image, quality: int = 95) -> float:
    """Size of the image as a JPEG file, in kB (1000 bytes)."""
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, format="JPEG", quality=quality)
    return buffer.tell() / 1000


@dataclass(frozen=True)
class JpegIncompressibility(Scorer):
    """The size in kB: rewards detail."""

    quality: Annotated[int, Field(ge=1, le=100)] = 95

    def __call__(self, images: list[Image.Image], prompts: list[str], metadata: list[Metadata]) -> list[float]:
        return [jpeg_kilobytes(image, self.quality) for image in images]


@dataclass(frozen=True)
class JpegCompressibility(JpegIncompressibility):
    """Minus the size in kB, divided by 500: rewards smoothness."""

    def __call__(self, images: list[Image.Image], prompts: list[str], metadata: list[Metadata]) -> list[float]:
        return [-size / 500 for size in super().__call__(images, prompts, metadata)]
