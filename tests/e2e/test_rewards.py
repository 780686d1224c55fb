"""Scorers over Ray whose processes die or hang in the middle of a run: it loses nothing and says what happened."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# Brightness; the n-th call of all processes together may fail, and one prompt always kills the process that scores it.
FAULTY = """
import os, signal, time
import numpy as np

def compute_score(images, prompts, metadata, log, faults, poison):
    with open(log, "a") as file:
        file.write(f"{os.getpid()} ")
    fault = faults.get(len(open(log).read().split()))
    if any("poison" in prompt for prompt in prompts):
        fault = poison
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "hang":
        time.sleep(1000)
    if fault == "raise":
        raise OSError("lost")
    return [float(np.asarray(image).mean()) / 255 for image in images]
"""
WATCHED = """
import os

def compute_score(images, prompts, metadata):
    return {"width": [image.width for image in images], "pid": [os.getpid()] * len(images)}
"""


@pytest.fixture
def run(train: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    (tmp_path / "faulty.py").write_text(FAULTY)
    (tmp_path / "watched.py").write_text(WATCHED)
    (tmp_path / "prompts.txt").write_text("a red fox\na poison\nblue\na sign 482\n")

    def start(name: str, faults: str, poison: str, *overrides: str, **keys: Any) -> Any:
        kwargs = f"{{log: {tmp_path / f'{name}.log'}, faults: {faults}, poison: {poison}}}"
        scorer = f"+reward.scorers.mean={{path: {tmp_path / 'faulty.py'}, kwargs: {kwargs}, timeout: 8, replicas: 2}}"
        watched = f"+reward.scorers.watched={{path: {tmp_path / 'watched.py'}, weight: 0}}"
        fixed = {"scorer": "", "data__train": tmp_path / "prompts.txt", "data__shuffle": "false"}
        fixed |= {"rollout__micro_batch_size": 2, "rollout__n": 2}
        return train(tmp_path / name, scorer, watched, *overrides, **fixed | keys)

    return start


def test_processes_that_die_or_hang_cost_time_but_no_scores(
    run: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    plain = run("plain", "{}", "raise")
    faulty = run("faulty", "{1: kill, 6: hang}", "kill", cluster__launcher="ray", cluster__num_workers=1)
    pids = plain.column("reward/watched/pid/mean"), faulty.column("reward/watched/pid/mean")
    assert len(set(pids[0])) == len(set(pids[1])) == 1  # the other scorer's process lived on
    for row, other in zip(faulty.untimed(), plain.untimed(), strict=True):
        assert row == pytest.approx(other | {name: row[name] for name in row if "/pid/" in name}, rel=1e-4, abs=1e-6)
    assert faulty.column("group/dropped") == [1, 0]
    # one killed, one that hung, and two for the prompt that kills
    assert sum(faulty.column("scorer/mean/restarts")) == 4 and not any(faulty.column("scorer/watched/restarts"))
    for happened in ("mean: .*died.* 2 images of 'a poison'.*restarted", "mean: .* 8 s.* 2 images of '"):
        assert re.search(happened, caplog.text)
    assert re.search("mean has no score for image 0 of 'a poison': .*died", caplog.text)


def test_a_scorer_that_keeps_failing_stops_the_run_with_a_checkpoint(
    run: Callable[..., Any], arguments: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(AssertionError):  # the run's exit code
        run("run", "{5: raise, 6: raise}", "raise", "reward.retries=0", trainer__steps=4)
    assert re.search(r"100% .*step 3 .*reward\.max_failed=0\.5", capsys.readouterr().err)
    assert (tmp_path / "run" / "checkpoints" / "step_2" / "state.json").exists()
