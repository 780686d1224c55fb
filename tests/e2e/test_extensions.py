"""Extensions of the trainer: without the file of one and its line in the list a run still trains."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from drills import more

from gerl.trainer import extensions

NAMES = [name.partition(":")[0] for name in extensions.EXTENSIONS]
SETTINGS = "trainer.steps=1 logger.report=true logger.tensorboard=true".split()


def train_without(names: list[str], train: Callable[..., Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in names:
        monkeypatch.setitem(sys.modules, f"{extensions.__name__}.{name}", None)  # an import raises
    kept = tuple(e for e in extensions.EXTENSIONS if e.partition(":")[0] not in names)
    build = extensions.build_extensions
    monkeypatch.setattr("gerl.trainer.start.build_extensions", lambda config: build(config, kept))
    return train(folder / "run", *SETTINGS, validation__data=folder / "val.txt")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "val.txt").write_text("a red fox\nblue\n")
    return tmp_path


@pytest.mark.parametrize("name", [pytest.param(name, marks=more) for name in NAMES])
def test_a_run_trains_without_an_extension(
    name: str, folder: Path, train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = train_without([name], train, folder, monkeypatch)
    assert run.checkpoint(1).is_dir() and len(run.metrics) == 2


def test_a_run_trains_without_any_extension(
    folder: Path, train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = train_without(NAMES, train, folder, monkeypatch)
    assert run.checkpoint(1).is_dir() and len(run.metrics) == 2
    assert {path.name for path in run.folder.iterdir()} >= {"checkpoints", "metrics.jsonl", "validation"}
    assert not list(run.folder.glob("*.html")) and not (run.folder / "live").exists()
