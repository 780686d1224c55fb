"""Statistics of images that need no model, by which the guard compares them with the base model's images."""

from collections.abc import Sequence

import numpy as np
from PIL import Image

from gerl.rewards.scorers.simple import LUMA, colourfulness, jpeg_kilobytes, sharpness

SIDE = 512  # pixels: larger images are measured in the centre only
THUMBNAIL = 16  # pixels: size at which images are compared with each other
COMPARED = 1000  # maximum number of images compared with each other; the guard uses the mean
RINGS = 16  # of the spectrum, from constant to a period of two pixels


def image_statistics(pixels: Sequence[np.ndarray] | np.ndarray) -> dict[str, np.ndarray]:
    """Return statistic -> its values for B images `[H, W, 3]` uint8, `[B]`, and `thumbnail` `[B, 16, 16, 3]` uint8.

    For a video `[F, H, W, 3]` its middle frame is used. `sharpness`, `colourfulness` and `jpeg_kilobytes` are those of
    the scorers with these names; `red`, `green` and `blue` are means in [0, 1]; `high_frequency` and `grid`: see
    `spectrum`.
    """
    stills = [image[len(image) // 2] if image.ndim == 4 else image for image in pixels]
    rows = [_statistics(still) for still in stills]
    columns = {name: np.array([row[name] for row in rows], dtype=np.float32) for name in rows[0]}
    small = [Image.fromarray(still).resize((THUMBNAIL, THUMBNAIL), Image.Resampling.BOX) for still in stills]
    return columns | {"thumbnail": np.stack([np.asarray(image) for image in small])}


def _statistics(still: np.ndarray) -> dict[str, float]:
    top, left = (max(0, (length - SIDE) // 2) for length in still.shape[:2])
    still = still[top : top + SIDE, left : left + SIDE]
    image = Image.fromarray(still)
    red, green, blue = still.reshape(-1, 3).mean(0) / 255
    high_frequency, grid = spectrum(still @ LUMA / 255)
    return {
        "sharpness": sharpness(image),
        "colourfulness": colourfulness(image),
        "jpeg_kilobytes": jpeg_kilobytes(image),
        "high_frequency": high_frequency,
        "grid": grid,
        "red": float(red),
        "green": float(green),
        "blue": float(blue),
    }


def spectrum(luma: np.ndarray) -> tuple[float, float]:
    """Return two statistics of the power spectrum of a luminance `[H, W]` in [0, 1], with a Hann window.

    `high_frequency`: the share of the power, excluding the mean, above half of the highest frequency; noise raises it.
    `grid`: the common logarithm of the largest power of a single frequency above a quarter of the highest, relative to
    the mean of its ring; a pattern that repeats every few pixels raises it, noise and edges do not.
    """
    height, width = luma.shape
    window = np.outer(np.hanning(height + 2)[1:-1], np.hanning(width + 2)[1:-1])
    power = np.abs(np.fft.rfft2((luma - luma.mean()) * window)) ** 2
    radius = 2 * np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])  # 1: a period of two pixels
    ring = np.minimum((radius * RINGS).astype(int), RINGS).ravel()
    flat, total = power.ravel(), power.sum()
    if total < 1e-12:  # a single colour
        return 0.0, 0.0
    means = np.bincount(ring, flat, RINGS + 1) / np.maximum(np.bincount(ring, minlength=RINGS + 1), 1)
    outer = ring >= RINGS // 4
    peak = float((flat[outer] / np.maximum(means[ring[outer]], 1e-15 * total)).max()) if outer.any() else 1.0
    return float(power[radius >= 0.5].sum() / total), float(np.log10(max(peak, 1e-12)))


def unlikeness(thumbnails: np.ndarray, ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return each image's dissimilarity to images of its prompt and of other prompts, `[B]`; NaN without others.

    Root mean square differences of `thumbnails` `[B, 16, 16, 3]` uint8, relative to the range of a pixel. All pairs of
    at most `COMPARED` images of evenly spaced prompts are compared; other images have NaN.
    """
    numbers = np.asarray(ids)
    chosen = _spread(numbers)
    of_prompt, others = np.full((2, len(numbers)), np.nan)
    of_prompt[chosen], others[chosen] = _unlikeness(thumbnails[chosen], numbers[chosen])
    return of_prompt, others


def _spread(ids: np.ndarray) -> np.ndarray:
    """Return the indices of at most `COMPARED` images, of evenly spaced prompts."""
    prompts = np.unique(ids)
    count = max(1, min(len(prompts), COMPARED * len(prompts) // max(len(ids), 1)))
    chosen = prompts[np.arange(count) * len(prompts) // count]
    return np.flatnonzero(np.isin(ids, chosen))[:COMPARED]


def _unlikeness(thumbnails: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    flat = thumbnails.reshape(len(thumbnails), -1).astype(np.float64) / 255
    squares = (flat**2).sum(1)
    distances = np.sqrt(np.maximum(squares[:, None] + squares[None] - 2 * flat @ flat.T, 0) / flat.shape[1])
    same = np.equal.outer(ids, ids)
    of_prompt = same & ~np.eye(len(flat), dtype=bool)

    def mean(mask: np.ndarray) -> np.ndarray:
        counts = mask.sum(1)
        return np.where(counts > 0, (distances * mask).sum(1) / np.maximum(counts, 1), np.nan)

    return mean(of_prompt), mean(~same)
