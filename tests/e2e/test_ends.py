"""Which checkpoint of a run is the best, and what ends a run before its last step."""

import json
import logging
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gerl
from gerl.run.choice import find_checkpoint
from gerl.run.page import RunData
from gerl.trainer.extensions.deadline import Deadline
from gerl.trainer.main_flowgrpo import main

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


def test_debug_lines_say_what_each_worker_does_and_for_how_long(
    train: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = train(tmp_path / "plain", "trainer.steps=1")
    assert not [record for record in caplog.records if record.levelname == "DEBUG" and record.name.startswith("gerl")]
    found = train(tmp_path / "debug", "trainer.steps=1", "logger.level=debug")
    assert found.untimed() == plain.untimed()
    text = (found.folder / "log.txt").read_text()
    for line in (
        r"DEBUG \S+: worker 0: setup\(",
        r"DEBUG \S+: step 1: prompts \d+",
        r"DEBUG \S+: worker 0: sample\(task 0: \d+ image\(s\) of prompt \d+.*\) \.\.\.\n",
        r"DEBUG \S+: step 1: worker 0: sample\(task 0: .*\): \d+\.\d\d s\n",
        r"DEBUG \S+: step 1: scorer bright, process 0: score\(bright, \d+ image\(s\)\): \d+\.\d\d s\n",
        r"DEBUG \S+: step 1: \d+ images, reward [\d.]+ to [\d.]+, bright",
        r"DEBUG \S+: step 1: \d+ of \d+ images have credit",
        r"DEBUG \S+: worker 0: accumulate\(task 0.*\): \d+\.\d\d s\n",
        r"DEBUG \S+: step 1: actor/",
        r"DEBUG \S+: step 1: rollout \d+\.\d\d s, .*update \d+\.\d\d s",
    ):
        assert re.search(line, text), line
    assert logging.getLogger("gerl").level == logging.INFO and " DEBUG " not in (plain.folder / "log.txt").read_text()


@pytest.mark.parametrize("trial", ["true", "false"])
def test_a_column_that_no_validation_has_ends_the_run_at_its_start(
    refused: Callable[..., str], held_out: list[str], tmp_path: Path, trial: str
) -> None:
    keys = ["checkpoint.best=val/bright/drak/mean", f"reward.trial={trial}"]
    assert "did you mean val/bright/dark/mean" in refused(*held_out, *keys, scorer="", expect=2)
    assert not (tmp_path / "run" / "checkpoints").exists()


def goal(run: Any, name: str) -> tuple[int, str]:
    """A step before the last with the highest or lowest value so far, and the limit that it is the first to reach."""
    values = run.column(name)
    for step in (2, 1, 3):
        if values[step] in (max(values[: step + 1]), min(values[: step + 1])):
            side = "above" if values[step] > values[0] else "below"
            return step, f"trainer.stop_at={{metric: {name}, {side}: {values[step]}}}"
    raise AssertionError(values)


@pytest.fixture(scope="module")
def undisturbed(train: Callable[..., Any], held_out: list[str], tmp_path_factory: pytest.TempPathFactory) -> Any:
    return train(tmp_path_factory.mktemp("undisturbed") / "run", *held_out, scorer="")


def test_a_run_ends_at_a_limit_and_is_trained_further_with_another(
    train: Callable[..., Any],
    held_out: list[str],
    undisturbed: Any,
    run_of: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    last, stop_at = goal(undisturbed, "val/bright/mean")
    run, resume = run_of(tmp_path / "run"), f"checkpoint.resume={tmp_path / 'run'}"
    with caplog.at_level("INFO", "gerl"):
        train(run.folder, *held_out, stop_at, "checkpoint.every=0", scorer="")
    assert [row["step"] for row in run.metrics] == [*range(last + 1)] and run.checkpoint(last).is_dir()
    assert f"step {last}: val/bright/mean is " in caplog.text and "(trainer.stop_at): the run ends here" in caplog.text
    assert f"LoRA:   {run.checkpoint(last) / 'lora'}" in caplog.text and "finished in" in caplog.text
    assert json.loads((run.checkpoint(last) / "state.json").read_text())["finished"]
    caplog.clear()
    with caplog.at_level("INFO", "gerl"):
        assert main([resume, "trainer.steps=9"]) == 0
    assert "there is nothing left to do; val/bright/mean is " in caplog.text
    assert main([resume, "trainer.stop_at={}"]) == 0
    run.assert_same(undisturbed, 4)


def test_images_sampled_ahead_of_the_end_change_nothing(
    train: Callable[..., Any], held_out: list[str], run_of: Any, tmp_path: Path
) -> None:
    whole = train(tmp_path / "whole", *held_out, "trainer.staleness=1", scorer="")
    last, stop_at = goal(whole, "val/bright/dark/mean")
    run = train(tmp_path / "run", *held_out, "trainer.staleness=1", stop_at, scorer="")
    assert [row["step"] for row in run.metrics] == [*range(last + 1)]
    assert main([f"checkpoint.resume={run.folder}", "trainer.stop_at={metric: val/bright/mean, above: 1}"]) == 0
    run.assert_same(whole, 4)


def test_a_finished_run_is_left_alone_and_one_with_another_limit_goes_on(
    arguments: Callable[..., list[str]], held_out: list[str], undisturbed: Any, tmp_path: Path
) -> None:
    last, stop_at = goal(undisturbed, "val/bright/mean")
    command = [*arguments(tmp_path / "first" / "run", *held_out, stop_at, scorer=""), "checkpoint.resume=auto"]
    assert main(command) == main(command) == 0  # it is said that there is nothing left to do
    assert (tmp_path / "first" / "run" / "checkpoints" / f"step_{last}").is_dir()
    further = [argument for argument in command if not argument.startswith("trainer.stop_at")]
    assert main([*further, "trainer.stop_at={metric: val/bright/mean, above: 1}"]) == 0
    assert (tmp_path / "first" / "run" / "checkpoints" / "step_4").is_dir()


def test_a_limit_that_the_model_has_before_training_is_refused(
    refused: Callable[..., str], held_out: list[str]
) -> None:
    said = refused(*held_out, "trainer.stop_at={metric: val/bright/mean, above: 0}", scorer="", expect=2)
    assert "val/bright/mean is 0." in said and "before training: set a limit" in said


# --- A deadline, and passes over the prompts


def test_a_run_whose_time_is_over_saves_its_step_and_is_continued(
    arguments: Callable[..., list[str]],
    held_out: list[str],
    undisturbed: Any,
    run_of: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    stepping = Deadline.stepping

    def late(self: Deadline, run: Any) -> None:
        if run.state.step == 2:
            run.history.started -= 2 * 3600
        stepping(self, run)

    monkeypatch.setattr(Deadline, "stepping", late)
    run = run_of(tmp_path / "run")
    command = arguments(run.folder, *held_out, "checkpoint.every=0", "trainer.hours=1.5", scorer="")
    with caplog.at_level("INFO", "gerl"):
        assert main(command) == 128 + signal.SIGTERM
    (said,) = (message for message in caplog.messages if message.startswith("stopped after step 2"))
    assert "trainer.hours=1.5" in said and f"checkpoint.resume={run.folder}" in said
    assert run.checkpoint(2).is_dir() and json.loads((run.folder / "run.json").read_text())["sessions"][0]["end"]
    monkeypatch.undo()
    assert main([*command, "checkpoint.resume=auto"]) == 0
    run.assert_same(undisturbed, 4)


def test_in_python_a_run_whose_time_is_over_is_a_run(model: Path, tmp_path: Path) -> None:
    keys = {"sampling.height": 16, "sampling.width": 16, "sampling.num_inference_steps": 4, "trainer.hours": 1e-9}
    trainer = gerl.Trainer(model, lambda images: [0.0 for _ in images], ["a"], out=tmp_path / "run", **keys)
    assert [step.number for step in trainer] == []


def test_a_run_ends_after_passes_over_its_prompts(
    train: Callable[..., Any], held_out: list[str], undisturbed: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "gerl"):
        run = train(tmp_path / "run", *held_out, "trainer.epochs=1", "logger.report=true", scorer="")
    assert "trainer.epochs=1: 3 steps, 3 per epoch of 6 prompts" in caplog.text
    assert [row["step"] for row in run.metrics] == [0, 1, 2, 3] and run.checkpoint(3).is_dir()
    assert RunData("run", run.folder).overview()["steps"] == 3  # what the page shows
    resume = f"checkpoint.resume={run.folder}"
    caplog.clear()
    with caplog.at_level("INFO", "gerl"):
        assert main([resume]) == 0
    assert "is finished at step 3" in caplog.text and "trainer.epochs above 1" in caplog.text
    with caplog.at_level("INFO", "gerl"):
        assert main([resume, "trainer.epochs=2", "logger.report=false"]) == 0
    assert "trainer.epochs=2: 4 steps, 3 per epoch of 6 prompts; trainer.steps=4 is reached first" in caplog.text
    run.assert_same(undisturbed, 4)


def test_the_learning_rate_falls_to_the_end_of_the_last_epoch(
    train: Callable[..., Any], held_out: list[str], tmp_path: Path
) -> None:
    linear = "actor.lr_schedule=linear"
    run = train(tmp_path / "epochs", *held_out, linear, "trainer.epochs=1", scorer="")
    run.assert_same(train(tmp_path / "steps", *held_out, linear, "trainer.steps=3", scorer=""), 3)


def test_prompts_that_are_left_out_are_not_counted(
    train: Callable[..., Any], held_out: list[str], tmp_path: Path
) -> None:
    """Two of the six are longer than every tokenizer reads."""
    (tmp_path / "train.txt").write_text("\n".join(["a red fox", "blue", "a" * 40, "x y", "b" * 40, "a cat"]) + "\n")
    keys = [f"data.train={tmp_path / 'train.txt'}", "data.overlong=drop", "trainer.epochs=1"]
    run = train(tmp_path / "run", *held_out, *keys, scorer="")
    assert [row["step"] for row in run.metrics] == [0, 1, 2]
