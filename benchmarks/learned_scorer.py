"""A learned scorer for benchmarks/guard.py: random filters and ridge regression that predict the OCR's score of a sign.

    python benchmarks/learned_scorer.py FOLDER

fits it on the held-out images of the honest runs in FOLDER, of `python benchmarks/guard.py FOLDER --first-seed 1`, and
writes learned_scorer.npz; the images of one run are left out of the fit, and the correlation on them is printed.
"""

import functools
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

WEIGHTS = Path(__file__).with_suffix(".npz")
FILTERS, SIZE, STRIDE, RIDGE, SEED = 400, 7, 2, 30.0, 5
FITTED = [f"signs-OCR{name}" for name in ("-1", "_and_colour-1", "_slow-1", "_the_default-1", "_the_default-2")]
LEFT_OUT = "signs-OCR_the_default-4"
logger = logging.getLogger("learned_scorer")


def features(images: Sequence[Image.Image], filters: np.ndarray) -> np.ndarray:
    """Return means and maxima of rectified filter responses in the left, middle and right third: `[N, 6 * FILTERS]`."""
    rows = []
    for image in images:
        pixels = np.asarray(image.convert("L").resize((96, 32)), dtype=np.float32) / 255
        windows = np.lib.stride_tricks.sliding_window_view(pixels, (SIZE, SIZE))[::STRIDE, ::STRIDE]
        patches = windows.reshape(*windows.shape[:2], -1)
        patches = patches - patches.mean(-1, keepdims=True)
        responses = np.maximum(patches @ filters.T, 0)
        thirds = np.array_split(responses, 3, axis=1)
        rows.append(np.concatenate([part for third in thirds for part in (third.mean((0, 1)), third.max((0, 1)))]))
    return np.array(rows)


@functools.cache
def weights() -> dict[str, np.ndarray]:
    with np.load(WEIGHTS) as file:
        return {name: file[name].astype(np.float32) for name in file.files}


def predict(images: Sequence[Image.Image]) -> list[float]:
    """Return the predicted scores."""
    known = weights()
    columns = (features(images, known["filters"]) - known["mean"]) / known["scale"]
    return [float(value) for value in columns @ known["coefficients"] + known["offset"]]


def fit(folder: Path) -> float:
    """Fit the scorer and write its weights; returns the correlation on the images that are left out."""
    from gerl.run.validation import load_validation, validation_steps

    def read(name: str) -> tuple[list[Image.Image], list[float]]:
        images, scores = list[Image.Image](), list[float]()
        for step in validation_steps(folder / name):
            found = load_validation(folder / name, step)
            images += [Image.fromarray(pixels) for pixels in found.pixels]
            scores += [found.by_scorer["ocr"][i] or 0.0 for i in found.shown]
        return images, scores

    filters = np.random.default_rng(SEED).normal(size=(FILTERS, SIZE * SIZE)).astype(np.float32)
    filters = (filters - filters.mean(1, keepdims=True)).astype(np.float16).astype(np.float32)
    parts = [read(name) for name in FITTED]
    x = features([image for images, _ in parts for image in images], filters)
    y = np.array([score for _, scores in parts for score in scores])
    mean, scale = x.mean(0), x.std(0) + 1e-3
    z = (x - mean) / scale
    coefficients = np.linalg.solve(z.T @ z + RIDGE * len(z) / 100 * np.eye(z.shape[1]), z.T @ (y - y.mean()))
    known = {"filters": filters, "mean": mean, "scale": scale, "coefficients": coefficients, "offset": y.mean()}
    np.savez_compressed(WEIGHTS, **{name: np.asarray(value, dtype=np.float16) for name, value in known.items()})
    weights.cache_clear()
    images, scores = read(LEFT_OUT)
    return float(np.corrcoef(predict(images), scores)[0, 1])


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logger.info("correlation with the OCR on images that are left out: %.2f", fit(Path(sys.argv[1])))
