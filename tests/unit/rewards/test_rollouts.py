"""Sampling and scoring at the same time, in this process; over Ray it is in tests/e2e."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from executing import executed

from gerl.cluster import Cluster, Pending
from gerl.config import ClusterConfig, RewardConfig, ScorerConfig
from gerl.errors import ModelError
from gerl.protocol import Images, Prompt, Sample
from gerl.rewards.manager import RewardManager
from gerl.rewards.rollouts import PendingRollout, RoundRobin, advance

BATCHES = [[Sample(Prompt(i, f"p{i}", {"value": float(i)}), 0, 0, 1)] for i in range(20)]


@pytest.fixture
def manager(tmp_path: Path) -> RewardManager:
    file = tmp_path / "mine.py"
    file.write_text("def compute_score(images, prompts, metadata):\n    return [row['value'] for row in metadata]\n")
    return RewardManager(RewardConfig({"a": ScorerConfig(1.0, str(file))}), Cluster(ClusterConfig(launcher="local")))


def drawing(submitted: list[int]) -> Callable[[int], Pending[Images]]:
    def draw(i: int) -> Pending[Images]:
        submitted.append(i)
        return Pending("worker", value=Images(i, np.zeros((1, 4, 4, 3), np.uint8), 0.0))

    return draw


def sampled(
    manager: RewardManager,
    batches: Sequence[Sequence[Sample]],
    call: Callable[[int], Pending[Images]],
    workers: int,
    **more: Any,
) -> PendingRollout:
    return PendingRollout(manager, batches, RoundRobin(call, workers, len(batches)), **more)


def test_every_micro_batch_is_drawn_once_and_scored_in_its_place(manager: RewardManager) -> None:
    submitted: list[int] = []
    rollout = sampled(manager, BATCHES, drawing(submitted), 3)
    rollout.wait_until_sampled()
    assert submitted == list(range(20))
    assert [s.totals for s in rollout.finish()] == [[float(i)] for i in range(20)]
    assert [image.result().task_id for image in rollout.images] == list(range(20))


def test_what_drawing_raised_is_raised(manager: RewardManager) -> None:
    def fail() -> Images:
        raise ModelError("out of memory")

    with pytest.raises(ModelError, match="out of memory"):
        sampled(manager, BATCHES[:1], lambda _: Pending("worker", call=fail), 1).finish()


def test_scorers_go_on_after_drawing_failed(manager: RewardManager) -> None:
    """As when another worker takes the place of one that died; calls that were under way before are dropped."""

    def fail() -> Images:
        raise ModelError("lost its peer")

    failing = sampled(manager, BATCHES[:3], lambda _: Pending("worker", call=fail), 3)
    with pytest.raises(ModelError, match="lost its peer"):
        failing.finish()
    manager.give_up()
    manager.submit()
    assert len(manager.pools["a"].idle) + len(manager.running) == 1
    rollout = sampled(manager, BATCHES, drawing([]), 1)
    assert [s.totals for s in rollout.finish()] == [[float(i)] for i in range(20)]


@pytest.mark.parametrize("ahead", [0, 1])
def test_drawing_pauses_while_scorers_lag_behind(manager: RewardManager, ahead: int) -> None:
    """What is drawn and not scored stays bounded, later for steps ahead; here every call ends when it is submitted."""
    submitted: list[int] = []
    rollout = sampled(manager, BATCHES, drawing(submitted), 1, ahead=ahead)
    advance([rollout])
    assert submitted == [0, 1]  # no more are on their way to a worker at once
    (process,) = manager.pools["a"].idle
    manager.pools["a"].idle.clear()  # as while the process is at work
    for _ in range(10):
        advance([rollout])
    assert submitted == list(range(4 if ahead == 0 else 6))
    manager.pools["a"].idle.append(process)
    assert [s.totals for s in rollout.finish()] == [[float(i)] for i in range(20)]
    assert submitted == list(range(20))


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_no_worker_has_more_than_two_micro_batches_at_once(manager: RewardManager, workers: int) -> None:
    submitted: list[int] = []
    rollout = sampled(manager, BATCHES, drawing(submitted), workers)

    def on_their_way(worker: int) -> Sequence[int]:
        return [i for i in submitted if i % workers == worker and i not in rollout.sampled]

    while len(rollout.sampled) < len(BATCHES):
        rollout.submit()
        assert max(len(on_their_way(worker)) for worker in range(workers)) <= 2
        advance([rollout])


def test_the_work_grows_with_the_number_of_micro_batches_and_not_with_its_square(manager: RewardManager) -> None:
    def score(count: int) -> None:
        groups = [min(i, count - 1 - i) for i in range(count)]  # the halves of a group are far from each other
        batches = [[Sample(Prompt(g, f"p{g}", {"value": 1.0}), i, 0, 1)] for i, g in enumerate(groups)]
        rollout = sampled(manager, batches, drawing([]), 2)
        assert len(rollout.finish()) == count

    score(10)
    assert executed(lambda: score(400)) < 5 * executed(lambda: score(100))
