"""Over Ray, the update begins with the groups that are scored first: bit for bit as if it had waited for all."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import net
import pytest

SLOW = """
import time

import numpy as np

def compute_score(images, prompts, metadata, seconds=0.4):
    from pixels_of_the_scorer import HIGHEST  # beside this file

    time.sleep(seconds * len(images))
    return [None if prompt == "x y" and FAILS else float(np.asarray(image).mean()) / HIGHEST
            for image, prompt in zip(images, prompts)]
"""
KEYS = """
cluster.launcher=ray cluster.num_workers=2 rollout.prompts_per_step=3 rollout.n=2 rollout.micro_batch_size=2
actor.lr=0.02 algorithm.advantage_std=group
""".split()
WAYS = {
    "one update per step": ["algorithm=awm_fast"],
    "two updates per step": ["actor.updates_per_step=2", "rollout.prompts_per_step=4"],
    "a dropped group": ["reward.on_error=drop_group", "reward.max_failed=1", "reward.retries=0"],
}
WAITING = ["cluster.launcher=local", "+reward.scorers.bright.kwargs.seconds=0"]  # what nothing can overlap with


def slow_scorer(folder: Path, fails: bool = False) -> Path:
    (folder / "pixels_of_the_scorer.py").write_text("HIGHEST = 255")
    (folder / "slow.py").write_text(SLOW.replace("FAILS", str(fails)))
    return folder / "slow.py"


@pytest.mark.parametrize("way", WAYS)
def test_the_result_is_that_of_waiting(way: str, train: Callable[..., Any], tmp_path: Path) -> None:
    scorer = slow_scorer(tmp_path, way == "a dropped group")
    run = train(tmp_path / "early", *KEYS, *WAYS[way], scorer=scorer)
    expected = train(tmp_path / "late", *KEYS, *WAYS[way], *WAITING, scorer=scorer)
    run.assert_same(expected, 2)
    assert not expected.column("timing/overlap_s")
    overlap, dropped = run.column("timing/overlap_s"), run.column("group/dropped")
    assert len(overlap) == 2 and any(dropped) == (way == "a dropped group")
    assert all(seconds == 0 for seconds, lost in zip(overlap, dropped, strict=True) if lost)
    assert way == "a dropped group" or max(overlap) > 0


def test_a_worker_that_dies_meanwhile_leaves_no_gradient_behind(
    train: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scorer = slow_scorer(tmp_path)
    keys = [*KEYS, "actor.updates_per_step=1", "trainer.steps=3"]
    expected = train(tmp_path / "whole", *keys, *WAITING, scorer=scorer)
    for name, value in net.kills(tmp_path).items():
        monkeypatch.setenv(name, value)
    (tmp_path / "kills").mkdir()
    (tmp_path / "kills" / "add_task_gradient.1.3").write_text(str(int(signal.SIGKILL)))
    run = train(tmp_path / "killed", *keys, scorer=scorer)
    assert not list((tmp_path / "kills").iterdir())
    run.assert_same(expected, 3)
