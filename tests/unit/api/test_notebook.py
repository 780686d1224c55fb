"""The output of a notebook: progress, curve and the newest sheet."""

from pathlib import Path

from PIL import Image

from gerl.api.notebook import Board, in_notebook


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
