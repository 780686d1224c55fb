"""Runs to carry on, without tensors."""

import os
from pathlib import Path
from typing import Any

import pytest
from resumed_runs import KEYS, Made, add, composition

from gerl.trainer.run_folder import CURRENT


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current directory, with prompts."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.txt").write_text("one\n")
    (tmp_path / "held_out.txt").write_text("two\n")


@pytest.fixture
def made(here: None, tmp_path: Path) -> Made:
    """Make a run folder as a run of these keys leaves it."""
    count = 0

    def make(name: str, *more: str, steps: tuple[int, ...] = (5,), finished: bool = False, **state: Any) -> Path:
        nonlocal count
        folder = tmp_path / "outputs" / "signs" / name
        composed = composition(*KEYS, "data.train=train.txt", "validation.data=held_out.txt", *more)
        folder.mkdir(parents=True)
        (folder / CURRENT).write_text(composed.yaml())
        for step in steps:
            add(folder, composed.config, step, finished and step == steps[-1], **state)
            count += 1
            os.utime(folder / f"checkpoints/step_{step}/manifest.json", (1000 + count, 1000 + count))
        return folder

    return make
