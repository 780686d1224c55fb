"""From scores to credit: failed groups, groups without signal, what is normalised and shaped."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from crediting import PROMPTS, config, scored

from gerl.algorithms import build_algorithm
from gerl.algorithms.planning import plan_samples
from gerl.config import Config, RewardConfig, ScorerConfig
from gerl.errors import RewardError
from gerl.protocol import Scores
from gerl.trainer.step import Metrics, _counted, check_failures, credit_of, usable_rewards


def credited(c: Config, scores: Scores) -> tuple[Metrics, torch.Tensor]:
    rewards, metrics = usable_rewards(c, scores)
    return metrics, credit_of(c, build_algorithm(c), scores, rewards)


def test_credit_and_metrics() -> None:
    c = config()
    metrics, credit = credited(c, scored(c, [1.0, 3.0, 5.0, 5.0]))
    assert credit.tolist() == [[-1.0] * 3, [1.0] * 3, [0.0] * 3, [0.0] * 3]
    assert metrics == {
        "reward/mean": 3.5,
        "reward/best_of_n": 4.0,
        "reward/a/mean": 1.75,
        "reward/a/best_of_n": 2.0,
        "reward/a/success_rate": 0.75,
        "reward/b/mean": 7.0,
        "reward/b/best_of_n": 7.0,
        "reward/c/mean": 0.0,
        "reward/c/best_of_n": 0.0,
        "reward/std": pytest.approx(2.75**0.5),
        "reward/failures": 0.0,
        "group/zero_std_fraction": 0.5,
        "group/dropped": 0.0,
    }


def test_a_failed_group_is_not_trained_on_and_counted() -> None:
    c = config()
    metrics, credit = credited(c, scored(c, [1.0, 3.0, None, 5.0]))
    assert credit[:2].tolist() == [[-1.0] * 3, [1.0] * 3] and credit[2:].isnan().all()
    assert (metrics["reward/failures"], metrics["group/dropped"]) == (1.0, 1.0)
    assert metrics["group/zero_std_fraction"] == 0.0


def test_gdpo_sees_the_scorers_with_a_weight() -> None:
    c = config(adv_estimator="gdpo")
    _, credit = credited(c, scored(c, [1.0, 3.0, 5.0, 5.0]))
    expected = 1 / math.sqrt(0.5)  # +-1 times 2 from the first scorer, nothing from the others; then the batch's std
    assert credit[:, 0].tolist() == pytest.approx([-expected, expected, 0, 0], rel=1e-3)


def test_the_credit_is_shaped_by_a_watched_scorer() -> None:
    c = config(diversity="scale", diversity_scorer="b")
    found = scored(c, [1.0, 3.0, 5.0, 9.0])
    found.by_scorer["b"] = [0.1, 0.3, 0.3, 0.1]
    metrics, credit = credited(c, found)
    assert credit[:, 0].tolist() == pytest.approx([-1.0, 1.5, -2.0, 1.0]) and metrics[
        "group/diversity"
    ] == pytest.approx(0.2)
    found.by_scorer["b"][1] = None
    with pytest.raises(RewardError, match=r"algorithm\.diversity=scale: b has no score for 1 of the step's 4 images"):
        credited(c, found)


@pytest.mark.parametrize(
    ("how", "expected"),
    [("none", [-1.0, 1.0, -0.5, 0.5]), ("group", [-1.0, 1.0, -1.0, 1.0]), ("rank", [-0.5, 0.5, -0.5, 0.5])],
)
def test_scores_are_normalised_before_the_sum(how: Any, expected: list[float]) -> None:
    values = [2.0, 4.0, 0.0, 1.0]
    c, found = replace(config(), reward=RewardConfig({"a": ScorerConfig(normalise=how)})), Scores()
    found.add(Scores(plan_samples(c, PROMPTS[:2], 1, 0), list(values), {"a": list(values)}, [[]] * 4))
    metrics, credit = credited(c, found)
    assert credit[:, 0].tolist() == pytest.approx(expected, abs=1e-3)
    assert metrics["reward/mean"] == 1.75  # as the scorer said


def test_batch_normalisation_is_over_the_samples_that_have_a_score() -> None:
    scorers = {
        "a": ScorerConfig(normalise="batch", data_sources=["x"]),
        "b": ScorerConfig(normalise="batch", scale=100.0, data_sources=["y"]),
    }
    c, found = replace(config(), reward=RewardConfig(scorers)), Scores()
    columns: dict[str, list[float | None]] = {"a": [1.0, 3.0, None, None], "b": [None, None, 0.0, 10.0]}
    found.add(Scores(plan_samples(c, PROMPTS[:2], 1, 0), [1.0, 3.0, 0.0, 1000.0], columns, [[]] * 4))
    _, credit = credited(c, found)
    assert credit[:, 0].tolist() == pytest.approx([-1.0, 1.0, -1.0, 1.0], abs=1e-3)


def test_a_scorer_of_some_prompts_is_normalised_over_their_groups() -> None:
    ids = torch.tensor([0, 0, 0, 1, 1, 2, 2])
    scores = [None, None, None, 1.0, 3.0, 10.0, 30.0]
    for how, low in (("group", -1.0), ("rank", 0.0)):
        values = _counted(ScorerConfig(normalise=how), scores, ids)
        assert values.tolist() == pytest.approx([0.0, 0.0, 0.0, low, 1.0, low, 1.0], rel=1e-3)


def test_as_many_failures_as_allowed_stop_no_run() -> None:
    config = RewardConfig(on_error="drop_group", max_failed=0.5)
    check_failures([None, 1.0], "it broke", config, "images", "go on")
    with pytest.raises(RewardError, match=r"reward\.max_failed=0\.5"):
        check_failures([None, None, 1.0], "it broke", config, "images", "go on")
