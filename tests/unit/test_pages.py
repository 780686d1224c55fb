import base64
import io
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import reward_models.votes
from gerl.utils.pages import ASSETS, GAP, enlarge, grid, thumbnail, to_data_uri


def image(height: int, width: int, value: int = 0) -> np.ndarray:
    return np.full((height, width, 3), value, dtype=np.uint8)


def test_small_images_are_enlarged_without_smoothing() -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (32, 48, 3)).astype(np.uint8)
    large = np.asarray(enlarge(pixels, min_width=128))
    assert large.shape == (96, 144, 3)
    assert np.array_equal(large[1::3, 1::3], pixels)


@pytest.mark.parametrize(("width", "shown"), [(128, 128), (300, 300), (512, 512), (1024, 512)])
def test_width_of_tiles(width: int, shown: int) -> None:
    assert enlarge(image(64, width)).width == shown


@pytest.mark.parametrize(("count", "columns", "expected"), [(1, 8, (1, 1)), (5, 2, (2, 3)), (8, 8, (8, 1))])
def test_grid_layout(count: int, columns: int, expected: tuple[int, int]) -> None:
    sheet = grid([image(64, 128, 20 * i) for i in range(count)], columns=columns)
    across, down = expected
    assert sheet.size == (across * (128 + GAP) + GAP, down * (64 + GAP) + GAP)
    pixels = np.asarray(sheet)
    for i in range(count):
        x, y = GAP + (i % across) * (128 + GAP), GAP + (i // across) * (64 + GAP)
        assert (pixels[y : y + 64, x : x + 128] == 20 * i).all()


def test_captions_are_drawn_within_their_tile() -> None:
    plain = grid([image(64, 128)] * 2, ["", ""], columns=2)
    long = grid([image(64, 128)] * 2, ["", "a very long caption\nthat does not fit under a tile " * 5], columns=2)
    assert long.size == plain.size
    changed = np.argwhere((np.asarray(long) != np.asarray(plain)).any(axis=2))
    assert len(changed) > 50
    assert changed[:, 0].min() >= GAP + 64 and changed[:, 1].min() >= GAP + 128 + GAP
    assert changed[:, 1].max() < long.width - GAP


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        grid([])
    with pytest.raises(ValueError, match="2 captions, got 1"):
        grid([image(4, 4)] * 2, ["one"])
    with pytest.raises(ValueError, match="float"):
        grid([np.zeros((4, 4, 3))])


@pytest.mark.parametrize(("lossy", "kind"), [(False, "PNG"), (True, "JPEG")])
def test_data_uri(lossy: bool, kind: str) -> None:
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (8, 8, 3)).astype(np.uint8))
    head, data = to_data_uri(picture, lossy).split(",")
    assert head == f"data:image/{kind.lower()};base64"
    back = Image.open(io.BytesIO(base64.b64decode(data)))
    assert back.format == kind and back.size == (8, 8)
    if not lossy:
        assert back.tobytes() == picture.tobytes()


def test_small_images_stay_exact_and_large_ones_are_reduced() -> None:
    small = np.random.default_rng(0).integers(0, 256, (8, 128, 3), dtype=np.uint8)
    assert thumbnail(small, 256).startswith("data:image/png;base64,")
    large = thumbnail(np.zeros((600, 1000, 3), np.uint8), 256)
    assert large.startswith("data:image/jpeg;base64,") and len(large) < 10_000
    assert len(thumbnail(np.zeros((20_000, 256, 3), np.uint8), 256)) < 20_000  # not a page-long strip


def test_all_pages_have_the_same_colours() -> None:
    votes = Path(reward_models.votes.__file__).parent / "page" / "vote.css"

    def colours(file: Path) -> list[dict[str, str]]:
        light, dark, *_ = re.findall(r":root \{(.*?)\}", file.read_text(encoding="utf-8"), re.S)
        return [dict(re.findall(r"--(\w+): (#\w+);", block)) for block in (light, dark)]

    expected = colours(ASSETS / "live.css")
    for file in (ASSETS / "page.html.j2", votes):
        for found, known in zip(colours(file), expected, strict=True):
            assert len(found) > 5 and {name: known.get(name, value) for name, value in found.items()} == found, file
