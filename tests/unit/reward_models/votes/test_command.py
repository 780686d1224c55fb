"""The command line of voting, and the run that it starts; whole runs are in tests/e2e/test_vote.py."""

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml

from gerl.commandline.composition import compose_run
from gerl.errors import ConfigError, TrainingError
from reward_models.votes import reaper
from reward_models.votes.command import PARSER, prepare, train, voters


@pytest.mark.parametrize(
    ("text", "names"),
    [(None, []), ("anna", ["anna"]), ("[anna, ben]", ["anna", "ben"]), ("a.b@c,d-e_1", ["a.b@c", "d-e_1"])],
)
def test_voters_are_names_with_or_without_brackets(text: str | None, names: list[str]) -> None:
    assert voters(text) == names


@pytest.mark.parametrize("text", ["anna,", "a/b", "änna", "a b", "a,a"])
def test_what_cannot_be_part_of_a_link_is_no_name(text: str) -> None:
    with pytest.raises(ConfigError, match="voters="):
        voters(text)


def test_a_new_run_is_told_its_folder_which_has_the_time_in_it() -> None:
    folder, steps, given = prepare(["trainer.steps=7"])
    assert steps == 7 and given == ["trainer.steps=7", f"hydra.run.dir={folder}"]
    assert compose_run(given).run_dir == folder and folder.parts[:2] == ("outputs", "signs")


def test_a_folder_that_is_named_stays(tmp_path: Path) -> None:
    given = [f"hydra.run.dir={tmp_path / 'run'}", "reward.scorers.sharpness.weight=0"]
    assert prepare(given) == (tmp_path / "run", compose_run([]).config.trainer.steps, given)


def test_the_short_name_of_the_folder_is_understood(tmp_path: Path) -> None:
    assert PARSER.parse(["voters=a", f"out={tmp_path}"])[1] == [f"hydra.run.dir={tmp_path}"]


def test_a_run_that_is_carried_on_has_its_own_folder_and_steps(tmp_path: Path) -> None:
    """The checkpoint is looked at later, by the run."""
    step = tmp_path / "run" / "checkpoints" / "step_1"
    step.mkdir(parents=True)
    (step / "manifest.json").write_text("{}")
    config = compose_run(["trainer.steps=9"])
    (tmp_path / "run" / "config.yaml").write_text(config.yaml())
    assert yaml.safe_load(config.yaml())["trainer"]["steps"] == 9
    given = [f"checkpoint.resume={tmp_path / 'run'}"]
    assert prepare(given) == (tmp_path / "run", 9, given)
    assert prepare([*given, "trainer.steps=12"])[1] == 12


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("reward.scorers={a: {path: b.py}}", "the reward comes from votes"),
        ("+reward.scorers.vote={weight: 2}", "the reward comes from votes"),
        ("rollout.n=1", "at least 2"),
        ("trainer.stepz=1", "did you mean"),
    ],
)
def test_what_cannot_be_voted_on_is_refused_before_anything_starts(given: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        prepare([given])


def test_a_run_that_fails_is_said_to_voters_too(capfd: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    with pytest.raises(TrainingError, match="the run ended with 2: see its output above; the votes are kept"):
        train(["trainer.stepz=1"], None, said.append, threading.main_thread())
    assert said == ["The run ended with an error."] and "trainer.stepz" in capfd.readouterr().err


def test_a_service_that_stops_ends_the_run() -> None:
    gone = threading.Thread()
    with pytest.raises(TrainingError, match="the vote service stopped, and the run with it"):
        train(["--help"], None, lambda _: None, gone)


@pytest.mark.parametrize("written", [b"", b"!"])
def test_the_reaper_ends_a_run_whose_service_is_gone_without_a_word(written: bytes) -> None:
    run = subprocess.Popen(["sleep", "60"])
    watching = subprocess.Popen([sys.executable, "-I", "-S", reaper.__file__, str(run.pid)], stdin=subprocess.PIPE)
    try:
        watching.communicate(written, timeout=10)
        if written:
            assert run.poll() is None
        else:
            assert run.wait(10) == -signal.SIGTERM
    finally:
        run.kill()
        run.wait()
