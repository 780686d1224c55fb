"""A reward of your own as a class, for what is loaded once and kept: here a table of colours, else a model.

Alone, in place of the experiment's scorers, and beside them (the signs demo's is ocr):

python -m gerl.trainer.main_flowgrpo 'reward.scorers={colour: {path: examples/scorer_class.py}}'
python -m gerl.trainer.main_flowgrpo '+reward.scorers.colour={path: examples/scorer_class.py}'

gerl calls `compute_score`, which may be any object that can be called so; an instance keeps what it has loaded.
"""

from functools import cached_property
from typing import Any

import numpy as np
from PIL import Image, ImageColor

NAMES = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white", "gray")


class ColourMatch:
    """1 minus the distance of the mean colour to the one the prompt names, in [0, 1]."""

    @cached_property
    def colours(self) -> dict[str, np.ndarray]:
        """Loaded at the first score and not with the file, which the driver imports as well, to check it."""
        return {name: np.array(ImageColor.getrgb(name)) / 255 for name in NAMES}

    def __call__(
        self, images: list[Image.Image], prompts: list[str], metadata: list[dict[str, Any]], **kwargs: Any
    ) -> list[float]:
        return [self.score(image, prompt) for image, prompt in zip(images, prompts, strict=True)]

    def score(self, image: Image.Image, prompt: str) -> float:
        """Raises `ValueError` for a prompt without a colour: a made-up score would be learnt from."""
        named = [word for word in prompt.lower().split() if word in self.colours]
        if not named:
            raise ValueError(f"{prompt!r} names none of {', '.join(NAMES)}")
        mean = np.asarray(image.convert("RGB")).mean(axis=(0, 1)) / 255
        return float(1 - np.linalg.norm(mean - self.colours[named[0]]) / np.sqrt(3))


compute_score = ColourMatch()
