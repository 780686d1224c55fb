import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from gerl.config import ScorerConfig
from gerl.rewards.scorers import build_scorer
from gerl.rewards.scorers.jpeg import jpeg_kilobytes


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
