import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gerl.run.live import live_steps
from gerl.trainer.extensions.training_images import KEPT, MILESTONES, LiveImage, remove_live, save_live

ONE = LiveImage(0, 0, 0.5, {"ocr": None}, None)


def sheet(run_dir: Path, step: int) -> tuple[dict[str, int], np.ndarray]:
    path = run_dir / "live" / f"step_{step:06d}.json"
    return json.loads(path.read_text()), np.asarray(Image.open(io.BytesIO(path.with_suffix(".jpg").read_bytes())))


def test_images_are_on_a_sheet_in_their_order(tmp_path: Path) -> None:
    pixels = [np.full((32, 64, 3), 40 * i, np.uint8) for i in range(5)]
    save_live(tmp_path, 3, ["p"], [ONE] * 5, pixels, 12)
    values, found = sheet(tmp_path, 3)
    assert (values["of"], values["width"], values["height"]) == (12, 64, 32)
    for i in range(5):
        x, y = i % values["columns"] * 64, i // values["columns"] * 32
        assert abs(found[y : y + 32, x : x + 64].astype(int) - 40 * i).max() <= 2


@pytest.mark.parametrize(("shape", "size"), [((1024, 512, 3), (128, 256)), ((3, 40, 40, 3), (120, 40))])
def test_large_images_are_small_and_videos_are_stills(
    shape: tuple[int, ...], size: tuple[int, int], tmp_path: Path
) -> None:
    save_live(tmp_path, 1, ["p"], [ONE], [np.zeros(shape, np.uint8)], 1)
    values, found = sheet(tmp_path, 1)
    assert (values["width"], values["height"]) == size == found.shape[1::-1]


def save(run_dir: Path, step: int) -> None:
    save_live(run_dir, step, ["p"], [LiveImage(0, 0, float("nan"), {}, 1.0)], [np.zeros((4, 4, 3), np.uint8)], 1)


def test_the_last_steps_are_kept_and_some_before(tmp_path: Path) -> None:
    for step in range(1, 131):
        save(tmp_path, step)
        assert live_steps(tmp_path)[-1] == step and len(live_steps(tmp_path)) <= KEPT + MILESTONES
    assert live_steps(tmp_path) == [*range(8, 129, 8), 129, 130]
    assert len(list((tmp_path / "live").iterdir())) == 2 * len(live_steps(tmp_path))
    assert sheet(tmp_path, 130)[0]["images"] == [[0, 0, None, 1.0, {}]]  # type: ignore[comparison-overlap]
    save(tmp_path, 20)  # the run has gone back
    assert live_steps(tmp_path) == [8, 16, 20]
    remove_live(tmp_path)
    assert live_steps(tmp_path) == [] and not (tmp_path / "live").exists()
