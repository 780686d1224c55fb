"""Which checkpoint of a run is the best, and what ends a run before its last step."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gerl.run.checkpoint import find_checkpoint

# Brightness, and darkness as a further column of it.
TWO_WAYS = """
import numpy as np

def compute_score(images, prompts, metadata):
    bright = [float(np.asarray(image).mean()) / 255 for image in images]
    return {"score": bright, "dark": [1 - value for value in bright]}
"""
EVERY = "validation.every=1 checkpoint.every=1 checkpoint.keep=1 actor.lr=0.05 trainer.steps=4".split()


@pytest.fixture(scope="module")
def held_out(workplace: Path) -> list[str]:
    (workplace / "two_ways.py").write_text(TWO_WAYS)
    return [
        *EVERY,
        f"validation.data={workplace / 'val.txt'}",
        f"reward.scorers.bright.path={workplace / 'two_ways.py'}",
    ]


@pytest.mark.parametrize("trial", ["true", "false"])
def test_the_best_checkpoint_by_a_column_of_a_scorer_of_which_less_is_better(
    train: Callable[..., Any], held_out: list[str], tmp_path: Path, trial: str
) -> None:
    keys = ["checkpoint.best=-val/bright/dark/mean", f"reward.trial={trial}"]
    run = train(tmp_path / "run", *held_out, *keys, scorer="")
    dark = dict(enumerate(run.column("val/bright/dark/mean")))
    best = min((1, 2, 3, 4), key=lambda step: (dark[step], -step))
    _, checkpoint, why = find_checkpoint(run.folder)
    assert checkpoint.step == best and why == f"step {best}, the best: val/bright/dark/mean {dark[best]:.3f}"
    assert {path.name for path in (run.folder / "checkpoints").iterdir()} == {f"step_{best}", "step_4"}
    stored = json.loads((run.checkpoint(4) / "state.json").read_text())["val_metrics"]
    assert stored["val/bright/dark/mean"] == dark[4] and stored["val/reward/mean"] == run.column("val/reward/mean")[4]


@pytest.mark.parametrize("trial", ["true", "false"])
def test_a_column_that_no_validation_has_ends_the_run_at_its_start(
    refused: Callable[..., str], held_out: list[str], tmp_path: Path, trial: str
) -> None:
    keys = ["checkpoint.best=val/bright/drak/mean", f"reward.trial={trial}"]
    assert "did you mean val/bright/dark/mean" in refused(*held_out, *keys, scorer="", expect=2)
    assert not (tmp_path / "run" / "checkpoints").exists()
