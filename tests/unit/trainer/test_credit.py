"""From scores to credit: failed groups, groups without signal, what the rewards pay for."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from gerl.algorithms import build_algorithm
from gerl.algorithms.planning import plan_samples
from gerl.config import Config, RewardConfig, RolloutConfig, SamplingConfig, ScorerConfig, algorithm_config
from gerl.errors import RewardError
from gerl.protocol import Group, Prompt, ScorerFailure, Scores
from gerl.trainer.credit import Scored, conclude_validation, credit_step

PROMPTS = [Prompt(i, f"prompt {i}") for i in range(4)]


def config(**algorithm: object) -> Config:
    scorers = {"a": ScorerConfig(weight=2.0, success=1.5), "b": ScorerConfig(weight=0.0), "c": ScorerConfig(weight=1.0)}
    return Config(
        algorithm=algorithm_config(**{"advantage_std": "none"} | algorithm),
        sampling=SamplingConfig(num_inference_steps=3),
        rollout=RolloutConfig(prompts_per_step=2, n=2),
        reward=RewardConfig(scorers),
    )


def scored(c: Config, totals: list[float | None]) -> Scored:
    found = Scored()
    samples = plan_samples(c, PROMPTS, 1, 0)[: len(totals)]
    failures = [[] if t is not None else [ScorerFailure("a", "it broke")] for t in totals]
    columns = {"a": [None if t is None else t / 2 for t in totals], "b": [7.0] * len(totals), "c": [0.0] * len(totals)}
    half = len(totals) // 2
    for part in (slice(0, half), slice(half, None)):
        by_scorer = {name: values[part] for name, values in columns.items()}
        found.add(samples[part], Scores(totals[part], by_scorer, failures[part]))  # type: ignore[arg-type]
    return found


def test_credit_and_metrics() -> None:
    c = config()
    metrics, credit, _ = credit_step(c, build_algorithm(c), scored(c, [1.0, 3.0, 5.0, 5.0]))
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
    metrics, credit, _ = credit_step(c, build_algorithm(c), scored(c, [1.0, 3.0, None, 5.0]))
    assert credit[:2].tolist() == [[-1.0] * 3, [1.0] * 3] and credit[2:].isnan().all()
    assert (metrics["reward/failures"], metrics["group/dropped"]) == (1.0, 1.0)
    assert metrics["group/zero_std_fraction"] == 0.0


@pytest.mark.parametrize("kept", [0.0, 0.25])
def test_a_validation_without_all_scores_is_a_warning_and_has_no_mean(
    kept: float, caplog: pytest.LogCaptureFixture
) -> None:
    totals = [None, None, None, 5.0] if kept else [None] * 4
    c = replace(config(), reward=replace(config().reward, max_failed=1.0))
    metrics, reward = conclude_validation(c, scored(c, totals), 6)
    assert reward is None and metrics["val/failures"] == sum(total is None for total in totals)
    assert math.isnan(metrics["val/reward/mean"]) and math.isnan(metrics["val/a/mean"])
    assert math.isnan(metrics["val/a/success_rate"])
    assert (metrics["val/b/mean"], metrics["val/c/mean"]) == (7.0, 0.0)  # these are of all prompts
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert f"step 6: reward on {1 if kept else 0} of 4 held-out prompts" in record.getMessage()
    assert f"{3 if kept else 4} not scored" in record.getMessage()
    assert "scorer a has no score for held-out 'prompt 0': it broke" in record.getMessage()


def test_a_whole_validation_has_its_mean(caplog: pytest.LogCaptureFixture) -> None:
    c, found = config(), scored(config(), [1.0, 3.0, 5.0, 5.0])
    with caplog.at_level("INFO"):
        metrics, reward = conclude_validation(c, found, 6)
    assert reward == metrics["val/reward/mean"] == 3.5 and metrics["val/failures"] == 0
    assert caplog.messages == ["step 6: reward on 4 held-out prompts 3.500"]
    routed = replace(c.reward, scorers={**c.reward.scorers, "b": ScorerConfig(0, data_sources=["signs"])})
    found.by_scorer["b"] = [None, 7.0, None, None]  # it applies to one of them
    for i, sample in enumerate(found.samples):
        prompt = Prompt(sample.prompt.id, sample.prompt.text, {"data_source": "signs" if i == 1 else "photos"})
        found.samples[i] = replace(sample, prompt=prompt)
    metrics, reward = conclude_validation(replace(c, reward=routed), found, 6)
    assert metrics["val/b/mean"] == 7.0 and reward == 3.5


@pytest.mark.parametrize("asked", [0, 1])
def test_held_out_prompts_that_only_people_could_score_have_no_reward_and_no_failure(
    asked: int, caplog: pytest.LogCaptureFixture
) -> None:
    """`asked`: so many of them have another scorer with a weight, by their `data_source`."""
    c, found = config(), Scored()
    samples = plan_samples(c, PROMPTS, 1, 0)[:4]
    totals: list[float | None] = [3.0] * asked + [None] * (4 - asked)
    found.add(samples, Scores(totals, {"b": [7.0] * 4}, [[] for _ in totals]))
    with caplog.at_level("INFO"):
        metrics, reward = conclude_validation(c, found, 6)
    expected = {"val/failures": 0.0, "val/b/mean": 7.0} | ({"val/reward/mean": 3.0} if asked else {})
    assert metrics == expected and reward == (3.0 if asked else None)
    said = "reward on 1 held-out prompts 3.000" if asked else "4 held-out prompts are sampled; no scorer with a weight"
    assert len(caplog.messages) == 1 and f"step 6: {said}" in caplog.messages[0]


def test_each_kind_of_held_out_prompts_has_its_mean() -> None:
    c = config()
    found = scored(c, [1.0, 3.0, 5.0, 6.0])
    assert not [name for name in found.metrics(c.reward, validation=True) if name.count("/") > 2]
    sources = ("signs/short", "signs/short", "photos", None)
    for i, source in enumerate(sources):
        prompt = replace(found.samples[i].prompt, metadata={} if source is None else {"data_source": source})
        found.samples[i] = replace(found.samples[i], prompt=prompt)
    metrics = found.metrics(c.reward, validation=True)
    assert {name: value for name, value in metrics.items() if name.startswith("val/reward/")} == {
        "val/reward/mean": 3.75, "val/reward/signs_short/mean": 2.0, "val/reward/photos/mean": 5.0
    }  # fmt: skip
    found.totals[0], found.failures[0] = None, [ScorerFailure("a", "it broke")]
    # a mean of other prompts is not compared
    metrics = found.metrics(c.reward, validation=True)
    assert math.isnan(metrics["val/reward/signs_short/mean"]) and metrics["val/reward/photos/mean"] == 5.0


def test_a_validation_stops_the_run_as_a_step_does() -> None:
    c = config()
    with pytest.raises(
        RewardError, match=r"75% of the held-out images of step 6 .*max_failed=0\.5; .*it broke; .*resume"
    ):
        conclude_validation(c, scored(c, [None, None, None, 5.0]), 6)
    c = replace(c, reward=replace(c.reward, on_error="stop"))
    with pytest.raises(RewardError, match=r"^scorer a has no score for held-out 'prompt 1': .*on_error=drop_group"):
        conclude_validation(c, scored(c, [1.0, 2.0, 3.0, None]), 6)


def test_gdpo_sees_the_scorers_with_a_weight() -> None:
    c = config(adv_estimator="gdpo")
    _, credit, _ = credit_step(c, build_algorithm(c), scored(c, [1.0, 3.0, 5.0, 5.0]))
    expected = 1 / math.sqrt(0.5)  # +-1 times 2 from the first scorer, nothing from the others; then the batch's std
    assert credit[:, 0].tolist() == pytest.approx([-expected, expected, 0, 0], rel=1e-3)


def test_rewards_pay_for_the_kl() -> None:
    c = config(kl_coef=0.5, kl_in_reward=True)
    metrics, credit, _ = credit_step(c, build_algorithm(c), scored(c, [1.0, 3.0, 5.0, 5.0]), kl=[0.0, 4.0, 2.0, 0.0])
    assert credit[:, 0].tolist() == pytest.approx([0.0, 0.0, -0.5, 0.5])
    assert metrics["reward/mean"] == 3.5 and metrics["reward/kl"] == 1.5


def test_only_the_images_that_watched_scorers_doubt_pay_for_the_kl() -> None:
    c = config(kl_coef=0.5, kl_share=0.5, kl_in_reward=True)  # the watched scorer says the same of all
    algorithm = build_algorithm(c)
    metrics, credit, gate = credit_step(c, algorithm, scored(c, [1.0, 3.0, 5.0, 5.0]), kl=[0.0, 4.0, 2.0, 0.0])
    assert gate is not None and gate.tolist() == [0.0, 0.0, 0.0, 0.0]  # of two with the same doubt none is beyond
    found = scored(c, [1.0, 3.0, 5.0, 6.0])
    metrics, credit, gate = credit_step(c, algorithm, found, kl=[0.0, 4.0, 2.0, 4.0])
    assert gate is not None and gate.tolist() == [0.0, 0.0, 0.0, 1.0] and metrics["group/kl_share"] == 0.25
    assert credit[:, 0].tolist() == pytest.approx([-1.0, 1.0, 0.5, -0.5])  # 6 - 0.5 * 4 = 4
    assert credit_step(config(), build_algorithm(config()), found)[2] is None


def test_the_credit_is_shaped_by_a_watched_scorer() -> None:
    c = config(diversity="scale", diversity_scorer="b")
    found = scored(c, [1.0, 3.0, 5.0, 9.0])
    found.by_scorer["b"] = [0.1, 0.3, 0.3, 0.1]
    metrics, credit, _ = credit_step(c, build_algorithm(c), found)
    assert credit[:, 0].tolist() == pytest.approx([-1.0, 1.5, -2.0, 1.0]) and metrics[
        "group/diversity"
    ] == pytest.approx(0.2)
    found.by_scorer["b"][1] = None
    with pytest.raises(RewardError, match=r"algorithm\.diversity=scale: b has no score for 1 of the step's 4 images"):
        credit_step(c, build_algorithm(c), found)


def test_dynamic_sampling_trains_on_the_first_groups_with_a_signal() -> None:
    c = config(dynamic_sampling=2)
    found = scored(c, [5.0, 5.0, 1.0, 3.0, 2.0, 4.0, 0.0, 8.0])
    assert found.groups_with_signal() == [Group(1), Group(2), Group(3)]
    _, credit, _ = credit_step(c, build_algorithm(c), found)
    assert credit[[0, 1, 6, 7]].isnan().all()
    assert credit[2:6, 0].tolist() == [-1.0, 1.0, -1.0, 1.0]
    assert not torch.isnan(credit[2:6]).any()


def test_a_column_that_a_micro_batch_lacks_has_no_values_there() -> None:
    c = config()
    samples = plan_samples(c, PROMPTS, 1, 0)
    found = Scored()
    found.add(samples[:1], Scores([1.0], {"a": [1.0]}, [[]]))
    found.add(samples[1:3], Scores([2.0, 3.0], {"a": [2.0, 3.0], "a/detail": [5.0, 7.0]}, [[], []]))
    found.add(samples[3:4], Scores([None], {"a": [None]}, [[ScorerFailure("a", "it broke")]]))
    assert found.by_scorer == {"a": [1.0, 2.0, 3.0, None], "a/detail": [None, 5.0, 7.0, None]}
    assert found.metrics(c.reward)["reward/a/detail/mean"] == 6.0


@pytest.mark.parametrize(
    ("how", "expected"),
    [("none", [-1.0, 1.0, -0.5, 0.5]), ("group", [-1.0, 1.0, -1.0, 1.0]), ("rank", [-0.5, 0.5, -0.5, 0.5])],
)
def test_scores_are_normalised_before_the_sum(how: Any, expected: list[float]) -> None:
    values = [2.0, 4.0, 0.0, 1.0]
    c, found = replace(config(), reward=RewardConfig({"a": ScorerConfig(normalise=how)})), Scored()
    found.add(plan_samples(c, PROMPTS[:2], 1, 0), Scores(list(values), {"a": list(values)}, [[]] * 4))
    metrics, credit, _ = credit_step(c, build_algorithm(c), found)
    assert credit[:, 0].tolist() == pytest.approx(expected, abs=1e-3)
    assert metrics["reward/mean"] == 1.75  # as the scorer said


def test_batch_normalisation_is_over_the_samples_that_have_a_score() -> None:
    scorers = {
        "a": ScorerConfig(normalise="batch", data_sources=["x"]),
        "b": ScorerConfig(normalise="batch", scale=100.0, data_sources=["y"]),
    }
    c, found = replace(config(), reward=RewardConfig(scorers)), Scored()
    columns: dict[str, list[float | None]] = {"a": [1.0, 3.0, None, None], "b": [None, None, 0.0, 10.0]}
    found.add(plan_samples(c, PROMPTS[:2], 1, 0), Scores([1.0, 3.0, 0.0, 1000.0], columns, [[]] * 4))
    _, credit, _ = credit_step(c, build_algorithm(c), found)
    assert credit[:, 0].tolist() == pytest.approx([-1.0, 1.0, -1.0, 1.0], abs=1e-3)
