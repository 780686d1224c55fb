import io
import math
import re
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageFilter

from gerl.config import ScorerConfig
from gerl.errors import RewardError
from gerl.rewards.scorers import build_scorer
from gerl.rewards.scorers.simple import Colourfulness, Sharpness, colourfulness, jpeg_kilobytes, sharpness


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


def test_noise_is_larger_than_a_flat_image_and_units_are_those_of_the_reference() -> None:
    flat = Image.new("RGB", (512, 512), (200, 100, 50))
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (512, 512, 3), dtype=np.uint8))
    assert jpeg_kilobytes(flat) == pytest.approx(4.7, rel=0.3)
    assert jpeg_kilobytes(noise) == pytest.approx(308, rel=0.3)
    buffer = io.BytesIO()
    noise.save(buffer, format="JPEG", quality=95)
    arguments: tuple[list[Image.Image], list[str], list[dict[str, Any]]] = ([flat, noise], ["a", "b"], [{}, {}])
    large = build_scorer("jpeg_incompressibility", ScorerConfig())(*arguments)
    small = build_scorer("jpeg_compressibility", ScorerConfig())(*arguments)
    assert large[1] == len(buffer.getvalue()) / 1000
    assert small == pytest.approx([-kb / 500 for kb in large])


def test_quality_is_a_kwarg() -> None:
    image = Image.effect_noise((64, 64), 50)
    low, high = (
        build_scorer("jpeg_incompressibility", ScorerConfig(kwargs={"quality": q}))([image], ["a"], [{}])[0]
        for q in (10, 95)
    )
    assert low < high


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
def test_closed_forms_of_colourfulness(
    left: tuple[int, int, int], right: tuple[int, int, int], expected: float
) -> None:
    assert colourfulness(halves(left, right)) == pytest.approx(expected, abs=1e-12)


def test_saturation_raises_the_score_of_each_image_on_its_own() -> None:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8))
    pale = ImageEnhance.Color(image).enhance(0.3)
    scores = Colourfulness()([image, pale], ["a", "b"], [{}, {}])
    assert scores == [colourfulness(image), colourfulness(pale)]
    assert scores[0] > 2 * scores[1] > 0


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
