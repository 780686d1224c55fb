"""Whether an image has the colour that its prompt names: no model, made to be watched beside another reward."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from PIL import Image, ImageColor

from gerl.errors import RewardError
from gerl.rewards.scorers.base import Columns, Metadata, Scorer

NAMES = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white", "gray")


@dataclass(frozen=True, kw_only=True)
class Colour(Scorer):
    """1 minus the distance of the image's median colour from the one that the prompt names first, in [0, 1].

    `named`, a column that is watched: 1 where the median is nearer to that colour than to all others, else 0. The
    median is that of the ground, whatever is written on it. A prompt that names no colour asks for none: both are 1.
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
        asked = [word for word in re.findall(r"\w+", outside) if word in self._table]
        if not asked:
            return 1.0, 1.0
        median = np.median(np.asarray(image.convert("RGB")).reshape(-1, 3), axis=0) / 255
        distances = {name: float(np.linalg.norm(median - rgb)) for name, rgb in self._table.items()}
        nearest = min(distances, key=lambda name: distances[name])
        return 1 - distances[asked[0]] / np.sqrt(3), float(nearest == asked[0])
