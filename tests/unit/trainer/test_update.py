"""What the driver decides of an update by itself; whole runs are in tests/e2e."""

import math
from typing import Any

import pytest
import torch

from gerl.algorithms import build_algorithm
from gerl.config import ActorConfig, Config, algorithm_config
from gerl.errors import TrainingError
from gerl.protocol import Prompt, RolloutTask, Sample, StepResult, UpdateStats
from gerl.run.checkpoint import RunState
from gerl.trainer.update import Update, actor_metrics, has_signal, off_policy_metrics, update_parts


def update(half_precision: bool = False, **actor: float) -> Update:
    config = Config(actor=ActorConfig(**actor))  # type: ignore[arg-type]
    nobody: Any = None
    return Update(config, build_algorithm(config), nobody, RunState(), half_precision)


@pytest.mark.parametrize(
    ("half", "limit", "passes", "stops"), [(False, None, 9e-4, 2e-3), (True, None, 1.9e-2, 3e-2), (True, 0.5, 0.4, 0.6)]
)
def test_a_ratio_that_is_not_one_stops_the_run(half: bool, limit: float | None, passes: float, stops: float) -> None:
    checked = update(half, **({} if limit is None else {"max_ratio_deviation": limit}))
    checked.check_ratio(passes)
    with pytest.raises(TrainingError, match=r"actor\.max_ratio_deviation=.*model\.dtype=float32"):
        checked.check_ratio(stops)


def test_updates_without_a_finite_gradient_are_counted_and_fatal_after_the_limit() -> None:
    counted = update()
    counted.count(StepResult(1.0, 1e-3, True))
    for _ in range(3):
        counted.count(StepResult(float("nan"), 1e-3, False))
    assert (counted.state.policy_version, counted.state.nonfinite) == (1, 3)
    with pytest.raises(TrainingError, match=r"4 .*actor\.lr"):
        counted.count(StepResult(float("inf"), 1e-3, False))


def test_an_update_without_any_signal_is_decided_by_the_driver() -> None:
    credit = torch.tensor([[0.0, 0.0], [math.nan, math.nan]])
    assert not has_signal(credit, False) and has_signal(torch.tensor([[0.0, -1.0]]), False)
    assert build_algorithm(Config(algorithm=algorithm_config(kl_coef=0.1))).needs_all_samples
    assert has_signal(credit, True) and not has_signal(credit[1:], True)  # there is a KL


def test_a_nan_among_the_ratios_is_not_lost() -> None:
    total = sum([UpdateStats(ratio_deviation=float("nan")), UpdateStats(ratio_deviation=0.5)], UpdateStats())
    assert total.ratio_deviation is not None and math.isnan(total.ratio_deviation)


def test_actor_metrics_are_averages_over_pairs() -> None:
    sums = {
        "loss": 2.0,
        "kl": 1.0,
        "clip_fraction_low": 1.0,
        "clip_fraction_high": 2.0,
        "log_ratio_mean": -4.0,
        "a": 8.0,
    }
    metrics = actor_metrics(UpdateStats(4, sums, 0.5), StepResult(3.0, 1e-3, True), deviation=1e-6)
    assert metrics == {
        "actor/ratio_deviation": 1e-6,
        "actor/clip_fraction": 0.75,
        "actor/clip_fraction_low": 0.25,
        "actor/clip_fraction_high": 0.5,
        "actor/log_ratio_mean": -1.0,
        "actor/loss": 0.5,
        "actor/kl": 0.25,
        "actor/grad_norm": 3.0,
        "actor/lr": 1e-3,
        "actor/a": 2.0,
    }


def test_the_gradient_of_each_step_is_a_mean_over_what_was_measured() -> None:
    first, second = UpdateStats(1, step_squares={0: (2.0, 1), 3: (90.0, 1)}), UpdateStats(1, step_squares={0: (6.0, 1)})
    metrics = actor_metrics(first + second, None, None)
    assert metrics == {
        "actor/step_grad_norm/0": 2.0,
        "actor/step_grad_norm/3": pytest.approx(90**0.5),
        "actor/step_grad_share": pytest.approx(90 / 94),
    }
    assert actor_metrics(second, None, None) == {"actor/step_grad_norm/0": pytest.approx(6**0.5)}  # nothing to share
    assert "actor/step_grad_share" not in actor_metrics(
        UpdateStats(1, step_squares={0: (0.0, 1), 1: (0.0, 1)}), None, None
    )


def test_what_was_not_measured_has_no_metric() -> None:
    assert actor_metrics(UpdateStats(), None, None) == {}
    assert set(actor_metrics(UpdateStats(2, {"loss": 1.0}), StepResult(1.0, 1e-3, True), None)) == {
        "actor/loss", "actor/grad_norm", "actor/lr"
    }  # fmt: skip
    both = UpdateStats(1, {"loss": 1.0}) + UpdateStats(1, {"loss": 2.0, "kl": 3.0}, 0.5)
    assert both == UpdateStats(2, {"loss": 3.0, "kl": 3.0}, 0.5)


def test_how_far_ratios_went_is_said_of_off_policy_updates_only(caplog: pytest.LogCaptureFixture) -> None:
    sums = {"loss": 2.0, "clip_fraction_low": 1.0, "clip_fraction_high": 2.0, "log_ratio_abs": 0.4}
    sums |= {"outside_fraction": 3.0, "log_ratio_mean": 0.0}
    assert not [name for name in actor_metrics(UpdateStats(4, sums), None, None) if "abs" in name or "outside" in name]
    expected = {"clip_fraction": 0.75, "log_ratio_abs": 0.1, "outside_fraction": 0.75}
    assert off_policy_metrics(UpdateStats(4, sums)) == {f"actor/off_policy/{k}": v for k, v in expected.items()}
    assert off_policy_metrics(UpdateStats()) == off_policy_metrics(UpdateStats(4, {"loss": 1.0})) == {}
    measured = update()
    measured.clip_range = (2e-3, 1e-3)
    with caplog.at_level("INFO"):
        assert measured.spread(UpdateStats()) == {}
        for _ in range(2):
            assert measured.spread(UpdateStats(4, sums, 0.31))["actor/off_policy/clip_range"] == 1e-3
    (said,) = caplog.messages
    assert said == (
        "in the first off-policy update |log ratio| is 0.1 on average and |ratio - 1| at most 0.31: 75 % of the "
        "(sample, timestep) pairs are outside the clip range of 0.002 below and 0.001 above 1"
    )


def test_parts_of_a_step_are_nearly_equal() -> None:
    def task(number: int) -> RolloutTask:
        return RolloutTask(number, [Sample(Prompt(number, "a"), 0, number, number)], ())

    uneven = []
    for n in range(1, 12):
        for updates in range(1, 7):
            parts = [[t.id for t in part] for part in update_parts([task(i) for i in range(n)], updates)]
            sizes = [len(part) for part in parts]
            if (
                [i for part in parts for i in part] != list(range(n))
                or len(sizes) != min(n, updates)
                or max(sizes) - min(sizes) > 1
            ):
                uneven.append((n, updates, parts))
    assert not uneven
