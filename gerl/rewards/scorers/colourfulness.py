"""A cheap baseline: how colourful an image looks. It needs no model, and optimizing it ends in garish images.

Source: Hasler and Suesstrunk, "Measuring colourfulness in natural images" (SPIE 2003), the metric M3.
"""

import math
from dataclasses import dataclass

import numpy as np
from PIL import Image

from gerl.rewards.scorers.base import Metadata, Scorer


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
