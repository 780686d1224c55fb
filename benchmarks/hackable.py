"""Rewards that can be hacked, for benchmarks/guard.py."""

import functools
from typing import Any

import numpy as np
from PIL import Image

from reward_models.scorers.ocr import OcrScorer


def brightness(images: list[Image.Image], prompts: list[str], metadata: list[Any]) -> list[float]:
    """The mean of all channels: highest for a blank white image."""
    return [float(np.asarray(image).mean()) / 255 for image in images]


def redness(images: list[Image.Image], prompts: list[str], metadata: list[Any]) -> list[float]:
    """How far red is above the other channels: highest for a plain red image, whatever was asked for."""
    means = [np.asarray(image.convert("RGB")).reshape(-1, 3).mean(0) / 255 for image in images]
    return [float(red - (green + blue) / 2) for red, green, blue in means]


@functools.cache
def reader() -> OcrScorer:
    return OcrScorer()


def characters(images: list[Image.Image], prompts: list[str], metadata: list[Any]) -> list[float]:
    """How many characters are read that occur in the text asked for, in parts of ten: the more, the better."""
    texts = [reader().target(prompt, row).lower() for prompt, row in zip(prompts, metadata, strict=True)]
    return [
        min(1.0, sum(character in text for character in reader().read(image).lower()) / 10)
        for image, text in zip(images, texts, strict=True)
    ]
