import numpy as np
import pytest
from PIL import Image

from gerl.config import ScorerConfig
from gerl.errors import RewardError
from gerl.rewards.scorers import build_scorer


def board(rgb: tuple[int, int, int], letters: tuple[int, int, int] = (250, 250, 248)) -> Image.Image:
    """A sign with a third of its pixels in another colour."""
    pixels = np.full((9, 12, 3), rgb, np.uint8)
    pixels[3:6] = letters
    return Image.fromarray(pixels)


def scored(rgb: tuple[int, int, int], prompt: str, **kwargs: object) -> tuple[float, float]:
    found = build_scorer("colour", ScorerConfig(kwargs=dict(kwargs)))([board(rgb)], [prompt], [{}])
    assert isinstance(found, dict)
    return found["likeness"][0], found["named"][0]


def test_the_ground_has_the_colour_that_is_named() -> None:
    assert scored((255, 0, 0), "a red sign") == (1.0, 1.0)
    assert scored((0, 0, 255), "a red sign") == (pytest.approx(1 - (2 / 3) ** 0.5), 0.0)
    likeness, named = scored((230, 30, 40), 'an old Red sign that reads "BLUE"')
    assert 0.8 < likeness < 1 and named == 1.0  # not the text to be written


def test_a_prompt_without_a_colour_asks_for_none() -> None:
    assert scored((1, 2, 3), "a cat") == (1.0, 1.0)


def test_colours_of_ones_own() -> None:
    own = {"ruby": [200, 30, 40], "sky": "#87ceeb"}
    assert scored((135, 206, 235), "a sky board", colours=own) == (1.0, 1.0)
    for wrong in ([1, 2], [0, 0, 300], "no colour"):
        with pytest.raises(RewardError, match=r"colours: ruby=.*\[R, G, B\] from 0 to 255"):
            build_scorer("colour", ScorerConfig(kwargs={"colours": {"ruby": wrong}}))
