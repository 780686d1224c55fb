import numpy as np
import pytest

from gerl.workers import image_statistics as module
from gerl.workers.image_statistics import image_statistics, spectrum, unlikeness


def test_noise_has_more_fine_detail_than_a_ramp_and_a_pattern_stands_out_of_the_spectrum() -> None:
    generator = np.random.default_rng(0)
    ramp = np.linspace(0, 1, 64)[None].repeat(48, 0)
    noise = ramp + 0.2 * generator.normal(size=ramp.shape)
    pattern = ramp + 0.2 * np.sin(np.pi * np.arange(64) * 0.8)
    fine, grids = zip(*(spectrum(luma) for luma in (ramp, noise, pattern)), strict=True)
    assert fine[0] < 0.01 < 0.2 < fine[1]
    assert grids[2] > grids[1] + 0.5
    assert spectrum(np.full((8, 8), 0.5)) == (0.0, 0.0)


def test_the_share_of_fine_detail_of_white_noise_is_that_of_its_frequencies() -> None:
    share = np.mean([spectrum(np.random.default_rng(i).normal(size=(64, 64)))[0] for i in range(20)])
    # all but a disc of half the highest frequency, of a square whose corners go beyond it
    assert share == pytest.approx(1 - np.pi * 0.25**2, abs=0.02)


def test_every_image_has_its_numbers_whatever_its_size() -> None:
    generator = np.random.default_rng(0)
    images = [generator.integers(0, 255, size, dtype=np.uint8) for size in ((16, 24, 3), (600, 700, 3), (3, 16, 16, 3))]
    found = image_statistics(images)
    assert {values.shape[0] for values in found.values()} == {3} and found["thumbnail"].shape == (3, 16, 16, 3)
    assert all(np.isfinite(values).all() for values in found.values())
    assert found["red"][0] == pytest.approx(images[0][..., 0].mean() / 255, rel=1e-5)
    middle = image_statistics([images[1][44:556, 94:606], images[2][1]])
    for name in ("sharpness", "grid", "blue"):  # the middle of a large image, and of a video
        assert list(middle[name]) == pytest.approx([found[name][1], found[name][2]])


def test_unlikeness_is_the_mean_distance_within_and_between_prompts() -> None:
    levels = np.array([0, 51, 102, 255], np.uint8)
    thumbnails = np.broadcast_to(levels[:, None, None, None], (4, 16, 16, 3))
    own, others = unlikeness(thumbnails, [0, 0, 1, 1])
    assert list(own) == pytest.approx([0.2, 0.2, 0.6, 0.6])
    assert list(others) == pytest.approx([(0.4 + 1) / 2, (0.2 + 0.8) / 2, (0.4 + 0.2) / 2, (1 + 0.8) / 2])
    alone, _ = unlikeness(thumbnails, [0, 1, 2, 3])
    assert np.isnan(alone).all()


@pytest.mark.parametrize("each", [1, 3, 40])
def test_of_many_images_some_are_compared(monkeypatch: pytest.MonkeyPatch, each: int) -> None:
    monkeypatch.setattr(module, "COMPARED", 20)
    thumbnails = np.random.default_rng(0).integers(0, 256, (120, 16, 16, 3), dtype=np.uint8)
    ids = [i // each for i in range(120)]
    own, others = unlikeness(thumbnails, ids)
    chosen = np.flatnonzero(np.isfinite(others) | np.isfinite(own))
    assert 18 <= len(chosen) <= 20 and (each == 40 or chosen[-1] >= 100)  # of all parts of the file
    alone = unlikeness(thumbnails[chosen], [ids[i] for i in chosen])
    np.testing.assert_array_equal((own[chosen], others[chosen]), alone)
    same = [i for i in chosen if ids[i] == ids[chosen[0]]]
    assert len(same) == min(each, 20)
