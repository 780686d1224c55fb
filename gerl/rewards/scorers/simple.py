"""Scorers without a model, for first tries and as baselines: sharpness, JPEG size, colourfulness and named colours."""

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

# --- A cheap baseline: how sharp an image is. It needs no model, and optimizing it ends in noise: a curve to compare
# with.
#
# Source: the variance of the Laplacian as a measure of focus (Pech-Pacheco et al., ICPR 2000).

LUMA = np.array([0.299, 0.587, 0.114])  # Rec. 601, of R, G, B


def sharpness(image: Image.Image) -> float:
    """Variance over pixels of the Laplacian (four neighbours minus four times the pixel) of the luminance in [0, 1].

    Border pixels have no Laplacian. The range is [0, 16], and 16 is a checkerboard of single pixels; a flat image or a
    linear ramp has 0.

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


# --- Rewards from the size of the image as a JPEG file: no model, so ideal for a first try.
#
# Source: "Training Diffusion Models with Reinforcement Learning" (DDPO, arXiv 2305.13301); the scales are those of
# Flow-GRPO's reward code.


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


# --- A cheap baseline: how colourful an image looks. It needs no model, and optimizing it ends in garish images.
#
# Source: Hasler and Suesstrunk, "Measuring colourfulness in natural images" (SPIE 2003), the metric M3.


def colourfulness(image: Image.Image) -> float:
    """Hypotenuse of the standard deviations of R - G and (R + G) / 2 - B, plus 0.3 times that of their means.

    Pixel values are 0..255. A grey image has 0; the paper calls 15 slightly, 45 averagely and 82 highly colourful.
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


# --- Whether an image has the colour that its prompt names: no model, made to be watched beside another reward

NAMES = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white", "gray")


@dataclass(frozen=True, kw_only=True)
class Colour(Scorer):
    """1 minus the distance of the image's median colour from the one that the prompt names first, in [0, 1].

    `named`, a column that is watched: 1 where the median is nearer to that colour than to all others, else 0. The
    median is that of the ground, whatever is written on it. For a prompt that names no colour both are 1.
    `colours`: name -> RGB, 0 to 255, or a name or code as CSS has it; by default eleven basic colours.
    """

    colours: Mapping[str, list[int] | str] = field(default_factory=lambda: {name: name for name in NAMES})

    def __post_init__(self) -> None:
        _ = self._table

    @cached_property
    def _table(self) -> dict[str, np.ndarray]:
        found = {}
        for name, value in self.colours.items():
            try:
                rgb = ImageColor.getrgb(value)[:3] if isinstance(value, str) else tuple(value)
            except ValueError:
                rgb = ()
            if len(rgb) != 3 or not all(0 <= part <= 255 for part in rgb):
                raise RewardError(f"colours: {name}={value}: expected [R, G, B] from 0 to 255, or a CSS colour")
            found[name.lower()] = np.array(rgb) / 255
        return found

    def __call__(self, images: list[Image.Image], prompts: list[str], metadata: list[Metadata]) -> Columns:
        scores = [self._score(image, prompt) for image, prompt in zip(images, prompts, strict=True)]
        likeness, named = zip(*scores, strict=True)
        return {"likeness": list(likeness), "named": list(named)}

    def _score(self, image: Image.Image, prompt: str) -> tuple[float, float]:
        outside = re.sub(r'["\u201c\u201d\u201e].*?["\u201c\u201d\u201e]', " ", prompt.lower())  # not the text to write
        named = [word for word in re.findall(r"\w+", outside) if word in self._table]
        if not named:
            return 1.0, 1.0
        median = np.median(np.asarray(image.convert("RGB")).reshape(-1, 3), axis=0) / 255
        distances = {name: float(np.linalg.norm(median - rgb)) for name, rgb in self._table.items()}
        nearest = min(distances, key=lambda name: distances[name])
        return 1 - distances[named[0]] / np.sqrt(3), float(nearest == named[0])
