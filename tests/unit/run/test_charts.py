from typing import Any

import pytest

from gerl.run.charts import Constant, Labels, best_step, constant, reward_charts, small_charts

ROWS: list[dict[str, Any]] = [
    {"step": 0, "val/reward/mean": 0.1},
    *(
        {"step": k, "reward/mean": k / 10, "reward/ocr/mean": 0.5, "actor/lr": 3e-4, "actor/grad_norm": 1.0 / k}
        for k in (1, 2, 3)
    ),
    {"step": 4, "val/reward/mean": 0.4, "time": "2026-01-01"},
]


def test_what_was_not_measured_is_neither_drawn_nor_listed() -> None:
    drawn, constants = small_charts(ROWS, Labels())
    assert [chart.title for chart in drawn] == ["norm of the gradient before clipping"]
    assert constants == [Constant("reward/ocr/mean", "0.5", 3), Constant("actor/lr", "0.0003", 3)]


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ([2.0, None, 2.0], Constant("x", "2", 2)),
        ([2.0, 2.1], None),
        ([2.0], None),  # a point: it may still change
        ([], Constant("x", "", 0)),
    ],
)
def test_a_constant_is_two_equal_values(values: list[float | None], found: Constant | None) -> None:
    assert constant([{"step": i, "x": value} for i, value in enumerate(values)], "x") == found


def test_the_curves_are_named_and_the_best_step_is_marked() -> None:
    wide, narrow = reward_charts(ROWS, Labels("with dice", "without"), {0: 0.02, 4: 0.03})
    for chart in (wide, narrow):
        assert "with dice" in chart.svg and "without" in chart.svg and "best: 0.400 at step 4" in chart.svg
    assert len(reward_charts(ROWS, Labels(), {})[0].svg) < len(wide.svg)  # no bars
    assert best_step(ROWS) == (4, 0.4) and best_step(ROWS[:2]) is None
    assert reward_charts([], Labels(), {}) == []
