import math

import numpy as np
import pytest
from PIL import Image, ImageEnhance

from gerl.rewards.scorers.colourfulness import Colourfulness, colourfulness


def halves(left: tuple[int, int, int], right: tuple[int, int, int]) -> Image.Image:
    image = Image.new("RGB", (8, 4), left)
    image.paste(right, (4, 0, 8, 4))
    return image


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ((90, 90, 90), (200, 200, 200), 0.0),
        ((255, 0, 0), (255, 0, 0), 0.3 * math.hypot(255, 127.5)),
        # R - G is +-255 and (R + G) / 2 - B is 127.5: deviations 255 and 0, means 0 and 127.5
        ((255, 0, 0), (0, 255, 0), 255 + 0.3 * 127.5),
        # R - G is 0, (R + G) / 2 - B is +-255
        ((255, 255, 0), (0, 0, 255), 255.0),
        ((10, 20, 30), (50, 10, 0), math.hypot(25, 22.5) + 0.3 * math.hypot(15, 7.5)),
    ],
    ids=["grey", "red", "red and green", "yellow and blue", "mixed"],
)
def test_closed_forms(left: tuple[int, int, int], right: tuple[int, int, int], expected: float) -> None:
    assert colourfulness(halves(left, right)) == pytest.approx(expected, abs=1e-12)


def test_saturation_raises_the_score_of_each_image_on_its_own() -> None:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8))
    pale = ImageEnhance.Color(image).enhance(0.3)
    scores = Colourfulness()([image, pale], ["a", "b"], [{}, {}])
    assert scores == [colourfulness(image), colourfulness(pale)]
    assert scores[0] > 2 * scores[1] > 0
