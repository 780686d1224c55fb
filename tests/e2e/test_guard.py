"""The guard in whole runs: a reward that takes from a watched scorer is said, and ends the run where that is wanted."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gerl.run.checkpoint import find_checkpoint
from gerl.run.guard import read_guard
from gerl.run.validation import load_validation
from gerl.trainer.main_flowgrpo import main

# the brightness is trained, and the darkness watched
DARK = """
import numpy as np

def compute_score(images, prompts, metadata):
    return [1 - float(np.asarray(image).mean()) / 255 for image in images]
"""
EASY = """
algorithm=flow_grpo sampling.num_inference_steps=5 model.lora_alpha=32 actor.lr=0.02 actor.ema_decay=0.5
rollout.prompts_per_step=3 rollout.n=12 rollout.micro_batch_size=18 trainer.steps=6 validation.every=2
checkpoint.every=1 checkpoint.keep=9
""".split()


@pytest.fixture
def command(arguments: Callable[..., list[str]], workplace: Path, tmp_path: Path) -> Callable[..., list[str]]:
    (tmp_path / "dark.py").write_text(DARK)
    (tmp_path / "val.txt").write_text("\n".join(f"prompt {i}" for i in range(12)))
    watched = f"+reward.scorers.dark={{path: {tmp_path / 'dark.py'}, weight: 0}}"

    def build(*overrides: str) -> list[str]:
        return arguments(tmp_path / "run", *EASY, watched, f"validation.data={tmp_path / 'val.txt'}", *overrides)

    return build


def test_a_run_is_warned_and_goes_on(
    command: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, run_of: Any
) -> None:
    larger = ["validation.images_per_prompt=2", "validation.height=24", "validation.width=32"]
    assert main(command("logger.report=true", *larger)) == 0
    run, rows = run_of(tmp_path / "run"), read_guard(tmp_path / "run")
    assert {row["signal"] for row in rows} >= {"watched", "disagreement"} and {row["column"] for row in rows} >= {
        "dark"
    }
    said = [record.message for record in caplog.records if "guard, watched/dark" in record.message]
    assert "dark, which is watched, fell from" in said[0] and len(said) < len(
        [r for r in rows if r["signal"] == "watched"]
    )
    assert "guard, watched/dark" in (run.folder / "report.html").read_text()
    assert run.column("guard/signals")[-1] == len([row for row in rows if row["step"] == 6]) > 0
    assert run.column("val/dark/gain")[-1] == pytest.approx(-run.column("val/bright/gain")[-1])
    low, high = run.column("val/bright/gain_low")[-1], run.column("val/bright/gain_high")[-1]
    assert 0 < low < run.column("val/bright/gain")[-1] < high
    kept = json.loads((run.folder / "validation" / "step_000006.json").read_text())
    assert kept["ids"] == [i for i in range(12) for _ in range(2)] and len(kept["looks"]["unlike_own"]) == 24
    pictures = load_validation(run.folder, 6).pixels
    assert len(pictures) == 24 and {p.shape for p in pictures} == {(24, 32, 3)}  # 16 x 16 in training
    assert (pictures[0] != pictures[1]).any() and "bright on 24 images of 12 held-out prompts: " in caplog.text


def test_a_run_ends_with_the_best_checkpoint_from_before(
    command: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command("guard.action=rollback")) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    first = read_guard(tmp_path / "run")[0]
    assert error.startswith(f"error: step {first['step']}: guard.action=rollback ended the run for ")
    assert "guard.ignored=[" in error and f"checkpoint.resume={tmp_path / 'run'}" in error
    assert find_checkpoint(tmp_path / "run")[1].step < first["step"] or first["step"] == 2
    ignored = "guard.ignored=[watched,disagreement/dark,looks,diversity]"
    assert main([f"hydra.run.dir={tmp_path / 'run'}", "checkpoint.resume=auto", ignored]) == 0
    assert (tmp_path / "run" / "checkpoints" / "step_6").is_dir()
