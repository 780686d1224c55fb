import json
from pathlib import Path

import numpy as np

from gerl.run.page import heldout
from gerl.run.page.heldout import HeldOut, encoded
from gerl.run.validation import save_validation


def save(folder: Path, step: int, prompts: list[str], rewards: list[float | None]) -> None:
    pixels = np.zeros((len(prompts), 8, 8, 3), np.uint8)
    save_validation(folder, step, prompts, pixels, rewards, {"a": rewards, "b": rewards})


def test_only_validations_of_the_prompts_of_the_newest_are_compared(tmp_path: Path) -> None:
    save(tmp_path, 0, ["other"], [1.0])
    save(tmp_path, 5, ["x", "y"], [0.123456, None])
    save(tmp_path, 6, ["x", "y"], [0.5, 0.7])
    found = HeldOut(tmp_path).read()
    assert found["steps"] == [5, 6] and found["rewards"] == [[0.1235, None], [0.5, 0.7]]
    assert found["errors"] == [None, 0.1]


def test_of_many_validations_some_are_shown(tmp_path: Path, monkeypatch: object) -> None:
    for step in range(12):
        save(tmp_path, step, ["x"], [0.5])
    every, heldout.STEPS = heldout.STEPS, 4
    try:
        assert HeldOut(tmp_path).read()["steps"] == [0, 4, 7, 11]
    finally:
        heldout.STEPS = every


def test_the_error_is_over_prompts_where_they_have_several_images(tmp_path: Path) -> None:
    save(tmp_path, 0, ["x", "x", "y", "y"], [0.0, 1.0, 0.4, 0.8])
    path = tmp_path / "validation" / "step_000000.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"ids": [0, 0, 1, 1]}))
    found = HeldOut(tmp_path).read()
    assert found["errors"] == [0.05] and found["ids"] == [0, 0, 1, 1]  # means 0.5 and 0.6


def test_nothing_yet(tmp_path: Path) -> None:
    found = HeldOut(tmp_path).read()
    assert found["steps"] == found["prompts"] == found["shown"] == []


def test_large_pictures_are_smaller_and_lossy() -> None:
    content, media = encoded(np.zeros((600, 1200, 3), np.uint8))
    assert media == "image/jpeg" and len(content) < 20_000
    assert encoded(np.zeros((8, 8, 3), np.uint8))[1] == "image/png"


def test_of_validations_only_what_is_shown_stays_in_memory(tmp_path: Path) -> None:
    prompts, ids = [f"prompt {i}" for i in range(4)], [0, 1, 2, 3]
    for step in (0, 5, 10):
        save_validation(tmp_path, step, prompts, [], [0.5] * 4, {"a": [0.5] * 4}, ids=ids, looks={"red": [0.1] * 4})
    held_out = HeldOut(tmp_path)
    held_out.read()
    rows = [row for _, row in held_out._known.values() if row is not None]
    assert len(rows) == 3 and not any("looks" in row for row in rows)
    assert len({id(row["prompts"]) for row in rows}) == len({id(row["ids"]) for row in rows}) == 1
