import re

import numpy as np
import pytest
from PIL import Image, ImageFilter

from gerl.errors import RewardError
from gerl.rewards.scorers.sharpness import Sharpness, sharpness


def grey(values: np.ndarray) -> Image.Image:
    return Image.fromarray(np.repeat(values[..., None], 3, axis=-1).astype(np.uint8))


ROWS, COLUMNS = np.mgrid[0:10, 0:12]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (np.full((10, 12), 77), 0.0),
        (20 * COLUMNS, 0.0),
        (255 * ((ROWS + COLUMNS) % 2), 16.0),  # the Laplacian is +4 and -4 on as many pixels
        (255 * (COLUMNS % 2), 4.0),  # +2 and -2
        # one white pixel: -4 once, 1 four times, 0 on the other 75 of 8 x 10 inner pixels
        (255 * ((ROWS == 5) & (COLUMNS == 5)), 20 / 80),
    ],
    ids=["flat", "ramp", "checkerboard", "stripes", "dot"],
)
def test_closed_forms(values: np.ndarray, expected: float) -> None:
    assert sharpness(grey(values)) == pytest.approx(expected, abs=1e-12)


def test_agrees_with_a_loop_over_pixels() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (6, 7, 3), dtype=np.uint8)
    y = [[(0.299 * r + 0.587 * g + 0.114 * b) / 255 for r, g, b in row.tolist()] for row in pixels]
    laplacian = [
        y[i - 1][j] + y[i + 1][j] + y[i][j - 1] + y[i][j + 1] - 4 * y[i][j] for i in range(1, 5) for j in range(1, 6)
    ]
    mean = sum(laplacian) / 20
    assert sharpness(Image.fromarray(pixels)) == pytest.approx(sum((x - mean) ** 2 for x in laplacian) / 20, rel=1e-12)


def test_blurring_lowers_the_score_of_each_image_on_its_own() -> None:
    noise = Image.effect_noise((32, 32), 60).convert("RGB")
    blurred = noise.filter(ImageFilter.GaussianBlur(2))
    scores = Sharpness()([noise, blurred], ["a", "b"], [{}, {}])
    assert scores == [sharpness(noise), sharpness(blurred)]
    assert scores[0] > 10 * scores[1] > 0


def test_an_image_without_inner_pixels_is_refused() -> None:
    with pytest.raises(RewardError, match=re.escape("3x3 pixels or more, not 2x9")):
        Sharpness()([Image.new("RGB", (2, 9))], ["a"], [{}])
