"""Drawing and scoring at the same time, in this process; over Ray it is in tests/e2e."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

import numpy as np
import pytest

from gerl.cluster import Cluster, Pending
from gerl.config import ClusterConfig, RewardConfig, ScorerConfig
from gerl.errors import ModelError
from gerl.protocol import Images, Prompt, Sample
from gerl.rewards.manager import RewardManager
from gerl.trainer.owners import Owners
from gerl.trainer.rollouts import Rollouts, advance

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


def test_every_micro_batch_is_drawn_once_and_scored_in_its_place(manager: RewardManager) -> None:
    submitted: list[int] = []
    rollouts = Rollouts(manager, BATCHES, drawing(submitted), [i % 3 for i in range(len(BATCHES))])
    rollouts.wait_until_drawn()
    assert submitted == list(range(20))
    assert [s.totals for s in rollouts.finish()] == [[float(i)] for i in range(20)]
    assert [image.result().task_id for image in rollouts.images] == list(range(20))


def test_what_drawing_raised_is_raised(manager: RewardManager) -> None:
    def fail() -> Images:
        raise ModelError("out of memory")

    with pytest.raises(ModelError, match="out of memory"):
        Rollouts(manager, BATCHES[:1], lambda _: Pending("worker", call=fail), [0]).finish()


def test_scorers_go_on_after_drawing_failed(manager: RewardManager) -> None:
    """As when another worker takes the place of one that died; calls that were under way before are dropped."""

    def fail() -> Images:
        raise ModelError("lost its peer")

    failing = Rollouts(manager, BATCHES[:3], lambda _: Pending("worker", call=fail), [0, 1, 2])
    with pytest.raises(ModelError, match="lost its peer"):
        failing.finish()
    manager.give_up()
    manager.submit()
    assert len(manager.pools["a"].idle) + len(manager.running) == 1
    rollouts = Rollouts(manager, BATCHES, drawing([]), [0] * len(BATCHES))
    assert [s.totals for s in rollouts.finish()] == [[float(i)] for i in range(20)]


@pytest.mark.parametrize("ahead", [0, 1])
def test_drawing_pauses_while_scorers_lag_behind(manager: RewardManager, ahead: int) -> None:
    """What is drawn and not scored stays bounded, later for steps ahead; here every call ends when it is submitted."""
    submitted: list[int] = []
    rollouts = Rollouts(manager, BATCHES, drawing(submitted), [0] * len(BATCHES), ahead=ahead)
    advance([rollouts])
    assert submitted == [0, 1]  # no more are on their way to a worker at once
    (process,) = manager.pools["a"].idle
    manager.pools["a"].idle.clear()  # as while the process is at work
    for _ in range(10):
        advance([rollouts])
    assert submitted == list(range(4 if ahead == 0 else 6))
    manager.pools["a"].idle.append(process)
    assert [s.totals for s in rollouts.finish()] == [[float(i)] for i in range(20)]
    assert submitted == list(range(20))


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_no_worker_has_more_than_two_micro_batches_at_once(manager: RewardManager, workers: int) -> None:
    submitted: list[int] = []
    rollouts = Rollouts(manager, BATCHES, drawing(submitted), [i % workers for i in range(len(BATCHES))])

    def on_their_way(worker: int) -> Sequence[int]:
        return [i for i in submitted if i % workers == worker and i not in rollouts.drawn]

    while len(rollouts.drawn) < len(BATCHES):
        rollouts.submit()
        assert max(len(on_their_way(worker)) for worker in range(workers)) <= 2
        advance([rollouts])


def executed(work: Callable[[], object]) -> int:
    """Lines of gerl that `work` executes; a comprehension counts once for each of its items."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> object:
        nonlocal count
        count += event == "line"
        return trace if "/gerl/" in frame.f_code.co_filename else None

    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(None)
    return count


def test_the_work_grows_with_the_number_of_micro_batches_and_not_with_its_square(manager: RewardManager) -> None:
    def score(count: int) -> None:
        groups = [min(i, count - 1 - i) for i in range(count)]  # the halves of a group are far from each other
        batches = [[Sample(Prompt(g, f"p{g}", {"value": 1.0}), i, 0, 1)] for i, g in enumerate(groups)]
        rollouts = Rollouts(manager, batches, drawing([]), [i % 2 for i in range(count)])
        assert len(rollouts.finish()) == count

    score(10)
    assert executed(lambda: score(400)) < 5 * executed(lambda: score(100))


def test_repetitions_are_found_without_a_search() -> None:
    def find(count: int) -> None:
        found = Owners(list(range(count)), [[i] for i in range(count)], [(i, 0) for i in range(count)])
        assert [found.repeated_after(i) for i in range(count)] == [[(i, 0)] for i in range(count)]

    assert executed(lambda: find(400)) < 5 * executed(lambda: find(100))
