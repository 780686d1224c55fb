"""The signals in the course of training: a KL that gains nothing, and groups that have become alike."""

from typing import Any

import numpy as np
import pytest

from gerl.run.guard_course import TrainingTrends, best_of, trend_signals
from gerl.run.health import Health
from gerl.run.validation import Validation

N = 48
START = np.random.default_rng(0).normal(0.4, 0.1, N)


def validation(step: int, gain: float, noise: float = 0.02) -> Validation:
    rewards = START + gain + noise * np.random.default_rng(step).normal(size=N)
    return Validation(step, [f"p{i}" for i in range(N)], [float(r) for r in rewards], {}, [], [])


def course(kl: dict[int, float], stuck: dict[int, float] | None = None, groups: float = 8.0) -> TrainingTrends:
    """Validations every four steps; the values hold for the steps up to each."""
    rows: list[dict[str, Any]] = [{"step": 0, "val/reward/mean": 0.4}]
    for step in range(1, 4 * max(len(kl), len(stuck or {})) + 1):
        block = -(-step // 4) * 4
        row: dict[str, Any] = {"step": step}
        row |= {"actor/kl": kl[block]} if block in kl else {}
        row |= {"health/groups": groups, "health/stuck_groups": stuck[block]} if stuck else {}
        rows.append(row | ({"val/reward/mean": 0.5} if step == block else {}))
    return TrainingTrends(rows)


def found(of: TrainingTrends, best: Validation, later: Validation, **more: Any) -> list[Any]:
    return trend_signals(of, validation(0, 0.0), best, later, **more)


def test_a_kl_that_grows_without_any_gain_is_a_signal() -> None:
    of = course({4: 0.01, 8: 0.04})
    (signal,) = found(of, validation(4, 0.2), validation(8, 0.2))
    assert signal.key == "kl/reward" and signal.step == 8 and len(signal.shown) == 8
    assert signal.threshold == pytest.approx(0.2, abs=0.02)  # the KL is four times as large: twice the gain in all
    assert abs(signal.value) < 0.02 and "grew from 0.01 to 0.04 since step 4" in signal.text


def test_a_gain_as_the_root_of_the_kl_is_none_and_neither_is_a_small_growth() -> None:
    of = course({4: 0.01, 8: 0.04})
    assert found(of, validation(4, 0.2), validation(8, 0.4)) == []
    assert found(course({4: 0.01, 8: 0.0105}), validation(4, 0.2), validation(8, 0.2)) == []
    assert found(course({4: 0.01, 8: 0.005}), validation(4, 0.2), validation(8, 0.1)) == []  # it came nearer
    assert found(course({4: 0.01, 8: 0.04}), validation(4, 0.0), validation(8, 0.0)) == []  # there was no gain before


def test_without_a_kl_to_one_model_there_is_no_such_signal() -> None:
    best, later = validation(4, 0.2), validation(8, 0.2)
    assert found(TrainingTrends([{"step": s} for s in range(9)]), best, later) == []
    assert found(course({4: 0.01, 8: 0.04}), best, later, measures_kl=False) == []
    assert found(course({4: 0.01, 8: 0.04}), validation(0, 0.0), later) == []  # the first validation is the best


def test_chance_alone_gives_hardly_any_signal() -> None:
    """The root law holds, and every validation has noise of its own."""
    alarms = 0
    for seed in range(200):
        best, later = validation(4 + 1000 * seed, 0.2, 0.1), validation(8 + 1000 * seed, 0.2 * 1.5, 0.1)
        of = TrainingTrends([{"step": 1, "actor/kl": 0.01}, {"step": later.step, "actor/kl": 0.01 * 1.5**2}])
        of.validated = [0, best.step]
        alarms += bool(trend_signals(of, validation(0, 0.0, 0.1), best, later))
    assert alarms <= 1


def test_groups_that_no_longer_differ_are_a_signal() -> None:
    of = course({}, {4: 0.0, 8: 1.0, 12: 7.0})
    assert found(of, validation(4, 0.1), validation(4, 0.1)) == []  # nothing to compare with yet
    assert found(of, validation(4, 0.1), validation(8, 0.1)) == []
    (signal,) = found(of, validation(4, 0.1), validation(12, 0.1))
    assert signal.key == "no_signal/groups" and signal.value == pytest.approx(7 / 8)
    assert 0 < signal.threshold == pytest.approx(1 - 0.0005 ** (1 / 32))  # 99.9 % of none in 32
    assert found(course({}, {4: 6.0, 8: 6.0}), validation(4, 0.1), validation(8, 0.1)) == []  # as in the beginning


def test_a_course_is_the_same_row_by_row() -> None:
    whole, grown = course({4: 0.01, 8: 0.04}), TrainingTrends()
    for step in range(1, 9):
        grown.add({"step": step, "actor/kl": 0.01 if step <= 4 else 0.04})
    grown.validated = [0, 4]
    assert (whole.kl(8), whole.kl(4)) == (grown.kl(8), grown.kl(4)) == (pytest.approx(0.04), pytest.approx(0.01))


def test_the_best_validation_is_the_last_of_the_highest() -> None:
    some = [validation(0, 0.0, 0), validation(4, 0.3, 0), validation(8, 0.3, 0), validation(12, 0.4, 0)]
    best = best_of(some, 12)
    assert best is not None and best.step == 8 and best_of(some, 0) is None


def test_groups_with_one_reward_below_the_best_are_counted() -> None:
    health = Health({})
    row = health.measure({}, True, [[1.0, 1.0], [0.2, 0.2], [0.3, 0.4], [0.5, None]])
    assert row["health/groups"] == 3 and row["health/stuck_groups"] == 1 and row["health/highest_reward"] == 1.0
    health.observe({"step": 1, **row})
    later = health.measure({}, True, [[0.9, 0.9], [0.9, 0.9]])  # all of the step, though not of the run
    assert later["health/stuck_groups"] == 2 and later["health/highest_reward"] == 1.0
    assert "health/groups" not in health.measure({}, True, [[None, None]])
