"""A cheap baseline: how sharp an image is. It needs no model, and optimizing it ends in noise: a curve to compare with.

Source: the variance of the Laplacian as a measure of focus (Pech-Pacheco et al., ICPR 2000).
"""

from dataclasses import dataclass

import numpy as np
from PIL import Image

from gerl.errors import RewardError
from gerl.rewards.scorers.base import Metadata, Scorer

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
