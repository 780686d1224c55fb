"""The output of a notebook: progress, curve and the newest sheet."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from gerl.api.runs import Board, in_notebook, listed
from gerl.config import DataConfig
from gerl.errors import DataError
from gerl.score.command import load_rgb, read_items


def test_this_is_no_notebook() -> None:
    assert not in_notebook()


def test_a_page_has_progress_curve_and_pictures(tmp_path: Path) -> None:
    board = Board(10, tmp_path)
    assert "step 0 of 10" in board.page(0) and "<svg" not in board.page(0)
    for step in range(4):
        board.rewards.append((step, 0.1 * step))
    board.held_out.append((0, 0.5))
    (tmp_path / "samples").mkdir()
    Image.new("RGB", (2000, 100), (200, 0, 0)).save(tmp_path / "samples" / "train_000003.png")
    page = board.page(3)
    assert "<progress max='10' value='3'" in page and "reward 0.300, held-out 0.500" in page
    assert page.count("<circle") == 1 and "data:image/jpeg;base64," in page and "train_000003" in page
    (line,) = [part for part in page.split("'") if part.count(",") == 4]
    xs, ys = zip(*(map(float, point.split(",")) for point in line.split()), strict=True)
    assert list(xs) == sorted(xs) and list(ys) == sorted(ys, reverse=True)  # reward rises, and y runs down


RED = Image.new("RGB", (6, 5), (255, 0, 0))
BYTES = np.asarray(RED)
CHANNELS_FIRST = torch.from_numpy(BYTES.copy()).permute(2, 0, 1)


def read(folder: Path, images: Any, prompts: Any = "a") -> list[np.ndarray]:
    file = listed(images, prompts, folder)
    return [np.asarray(load_rgb(item)) for item in read_items(str(file), None, None, DataConfig())]


@pytest.mark.parametrize(
    "image",
    [
        RED,
        RED.convert("P"),
        BYTES,
        BYTES.astype(np.int64),
        BYTES.astype(np.float32) / 255,
        CHANNELS_FIRST,
        CHANNELS_FIRST.to(torch.bfloat16).requires_grad_() / 255,
        CHANNELS_FIRST.permute(1, 2, 0),
        np.dstack([BYTES, np.full((5, 6), 255, np.uint8)]),
    ],
)
def test_a_picture_of_any_form_is_the_same_picture(image: Any, tmp_path: Path) -> None:
    assert all((found == BYTES).all() for found in read(tmp_path, [image, image]))


def test_one_picture_or_a_batch_or_the_output_of_a_pipeline(tmp_path: Path) -> None:
    batch = np.stack([BYTES, BYTES])
    counts = [len(read(tmp_path, given)) for given in (RED, BYTES, batch, torch.from_numpy(batch), iter([RED]))]
    assert counts == [1, 1, 2, 2, 1] and len(read(tmp_path, SimpleNamespace(images=[RED, RED]))) == 2
    assert (read(tmp_path, [np.full((4, 4), 7, np.uint8)])[0] == 7).all()
    (tmp_path / "a.png").write_bytes(b"")
    rows = listed([tmp_path / "a.png", "b.png"], ["a", {"prompt": "b", "x": 1}], tmp_path).read_text().splitlines()
    assert json.loads(rows[0])["image"] == str(tmp_path / "a.png") and json.loads(rows[1])["x"] == 1


def test_what_is_transparent_is_white(tmp_path: Path) -> None:
    clear = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    half = Image.new("LA", (4, 4), (0, 128))
    white, grey = read(tmp_path, [clear, half])
    assert (white == 255).all() and (grey == 127).all()


@pytest.mark.parametrize(
    ("images", "prompts", "message"),
    [
        ([RED, None], "a", "image 1 is NoneType: expected the path"),
        ([object()], "a", "image 0 is object"),
        (5, "a", "images are int"),
        ([np.zeros((8, 8, 2))], "a", r"image 0 has the shape \[8, 8, 2\]"),
        ([np.zeros((0, 4, 3))], "a", r"shape \[0, 4, 3\]"),
        ([BYTES.astype(np.float32)], "a", "values from 0 to 255: .*floats from 0 to 1"),
        ([BYTES / 255 * 2 - 1], "a", "values from -1 to 1"),
        ([np.full((4, 4, 3), np.nan)], "a", "values from nan"),
        ([Image.new("I;16", (4, 4))], "a", "8 bits"),
        ([RED], None, "prompts are missing"),
        ([RED], ["a", "b"], "2 prompts for 1 images"),
        ([RED], [None], "prompt 0 is NoneType"),
        ([RED], [{"prompt": "a", "source": RED}], "columns of prompt 0 must be strings and numbers"),
    ],
)
def test_what_is_no_picture_or_no_prompt_is_one_sentence(
    images: Any, prompts: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=message):
        listed(images, prompts, tmp_path)
