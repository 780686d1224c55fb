"""Scorers without a model, for testing and as baselines: sharpness, JPEG size, colourfulness and named colours."""

import io
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated

import numpy as np
from PIL import Image, ImageColor
from pydantic import Field

from gerl.errors import RewardError
from gerl.rewards.scorers.base import Columns, Metadata, Scorer
from gerl.utils.quotes import outside_quotes

# --- Sharpness: a cheap baseline without a model. Optimizing it leads to noise: a reference curve.
#
# Source: the variance of the Laplacian as a measure of focus (Pech-Pacheco et al., ICPR 2000).

LUMA = np.array([0.299, 0.587, 0.114])  # Rec. 601, for R, G, B


def sharpness(image: Image.Image) -> float:
    """Return the variance of the Laplacian (four neighbours minus four times the pixel) of the luminance in [0, 1].

    Border pixels are excluded. The range is [0, 16]; 16 is a checkerboard of single pixels, 0 a flat image or a linear
    ramp.

    Raises:
        RewardError: the image is less than 3 pixels wide or high.
    """
    if min(image.size) < 3:
        raise RewardError(f"sharpness needs an image of 3x3 pixels or more, not {image.width}x{image.height}")
    luma = np.asarray(image.convert("RGB"), dtype=np.float64) @ LUMA / 255
    neighbours = luma[:-2, 1:-1] + luma[2:, 1:-1] + luma[1:-1, :-2] + luma[1:-1, 2:]
    return float(np.var(neighbours - 4 * luma[1:-1, 1:-1]))


@dataclass(frozen=True)
class Sharpness(Scorer):
    """`sharpness` of each image."""

    def __call__(self, images: list[Image.Image], prompts: list[str], metadata: list[Metadata]) -> list[float]:
        return [sharpness(image) for image in images]


# --- JPEG file size as reward, without a model: ideal for testing
#
# Source: "Training Diffusion Models with Reinforcement Learning" (DDPO, arXiv 2305.13301); the scales are those of
# Flow-GRPO's reward code.


def jpeg_kilobytes(image: Image.Image, quality: int = 95) -> float:
    """Return the size of the image as a JPEG file, in kB (1000 bytes)."""
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, format="JPEG", quality=quality)
    return buffer.tell() / 1000


@dataclass(frozen=True)
class JpegIncompressibility(Scorer):
    """JPEG size in kB: rewards detail."""

    quality: Annotated[int, Field(ge=1, le=100)] = 95

    def __call__(self, images: list[Image.Image], prompts: list[str], metadata: list[Metadata]) -> list[float]:
        return [jpeg_kilobytes(image, self.quality) for image in images]


@dataclass(frozen=True)
class JpegCompressibility(JpegIncompressibility):
    """Negative JPEG size in kB, divided by 500: rewards smoothness."""

    def __call__(self, images: list[Image.Image], prompts: list[str], metadata: list[Metadata]) -> list[float]:
        return [-size / 500 for size in super().__call__(images, prompts, metadata)]


# --- Colourfulness: a cheap baseline without a model. Optimizing it leads to garish images.
#
# Source: Hasler and Suesstrunk, "Measuring colourfulness in natural images" (SPIE 2003), the metric M3.


def colourfulness(image: Image.Image) -> float:
    """Return the norm of the standard deviations of R - G and (R + G) / 2 - B, plus 0.3 times the norm of the means.

    Pixel values are 0..255. A grey image scores 0; the paper calls 15 slightly, 45 averagely and 82 highly colourful.
    """
    red, green, blue = np.moveaxis(np.asarray(image.convert("RGB"), dtype=np.float64), -1, 0)
    red_green, yellow_blue = red - green, (red + green) / 2 - blue
    deviation = math.hypot(np.std(red_green), np.std(yellow_blue))
    return deviation + 0.3 * math.hypot(np.mean(red_green), np.mean(yellow_blue))


@dataclass(frozen=True)
class Colourfulness(Scorer):
    """`colourfulness` of each image."""

    def __call__(self, images: list[Image.Image], prompts: list[str], metadata: list[Metadata]) -> list[float]:
        return [colourfulness(image) for image in images]


# --- Whether an image has the colour that its prompt names: no model, intended as an additional metric

NAMES = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white", "gray")


@dataclass(frozen=True, kw_only=True)
class Colour(Scorer):
    """1 minus the distance of the image's median colour from the first colour named in the prompt, in [0, 1].

    The column `named` is 1 if the median is closest to that colour, else 0. The median is the background colour,
    regardless of text on it. Both are 1 if the prompt names no colour. `colours`: name -> RGB, 0 to 255, or a CSS name
    or code; by default eleven basic colours.
    """

    colours: Mapping[str, list[int] | str] = field(default_factory=lambda: {name: name for name in NAMES})

    def __post_init__(self) -> None:
        _ = self._table

    @cached_property
    def _table(self) -> dict[str, np.ndarray]:
        table = {}
        for name, value in self.colours.items():
            try:
                rgb = ImageColor.getrgb(value)[:3] if isinstance(value, str) else tuple(value)
            except ValueError:
                rgb = ()
            if len(rgb) != 3 or not all(0 <= part <= 255 for part in rgb):
                raise RewardError(f"colours: {name}={value}: expected [R, G, B] from 0 to 255, or a CSS colour")
            table[name.lower()] = np.array(rgb) / 255
        return table

    def __call__(self, images: list[Image.Image], prompts: list[str], metadata: list[Metadata]) -> Columns:
        scores = [self._score(image, prompt) for image, prompt in zip(images, prompts, strict=True)]
        likeness, named = zip(*scores, strict=True)
        return {"likeness": list(likeness), "named": list(named)}

    def _score(self, image: Image.Image, prompt: str) -> tuple[float, float]:
        named = [word for word in re.findall(r"\w+", outside_quotes(prompt).lower()) if word in self._table]
        if not named:
            return 1.0, 1.0
        median = np.median(np.asarray(image.convert("RGB")).reshape(-1, 3), axis=0) / 255
        distances = {name: float(np.linalg.norm(median - rgb)) for name, rgb in self._table.items()}
        nearest = min(distances, key=lambda name: distances[name])
        return 1 - distances[named[0]] / np.sqrt(3), float(nearest == named[0])
