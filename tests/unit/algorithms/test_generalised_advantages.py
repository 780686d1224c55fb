"""Generalised advantage estimation against a naive loop and its limits, and the credit of a critic's values."""

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import training

from gerl.algorithms import build_algorithm
from gerl.algorithms.core_algos import batch_advantages, generalised_advantages, group_advantages
from gerl.algorithms.flow_grpo import FlowGRPO
from gerl.config import Config, CriticConfig, RolloutConfig, SamplingConfig, algorithm_config

HALVES = (0.0, 0.5, 1.0)
NAN = math.nan
GENERATOR = torch.Generator().manual_seed(0)
REWARDS = torch.randn(5, generator=GENERATOR, dtype=torch.double)
VALUES = torch.randn(5, 6, generator=GENERATOR, dtype=torch.double)
VALUES[:, 3] = NAN  # a step without noise
VALUES[1, :2] = VALUES[2, 5] = NAN  # other windows


def naive(reward: float, values: list[float], gamma: float, lam: float) -> list[float]:
    """Equation 16, as it is written."""
    actions = [k for k, value in enumerate(values) if not math.isnan(value)]
    errors = []
    for i, k in enumerate(actions):
        last = i == len(actions) - 1
        errors.append((reward if last else gamma * values[actions[i + 1]]) - values[k])
    found = [NAN] * len(values)
    for i, k in enumerate(actions):
        found[k] = sum((gamma * lam) ** j * error for j, error in enumerate(errors[i:]))
    return found


def test_a_naive_loop_gives_the_same() -> None:
    differ = []
    for gamma, lam in product(HALVES, HALVES):
        advantages = generalised_advantages(REWARDS, VALUES, gamma, lam)
        expected = [naive(r, v, gamma, lam) for r, v in zip(REWARDS.tolist(), VALUES.tolist(), strict=True)]
        if not torch.allclose(advantages, torch.tensor(expected, dtype=torch.double), equal_nan=True):
            differ.append((gamma, lam, advantages, expected))
    assert not differ


def test_without_values_and_at_lambda_1_every_step_has_the_reward() -> None:
    found = generalised_advantages(REWARDS, torch.zeros(5, 4, dtype=torch.double), 1.0, 1.0)
    assert torch.equal(found, REWARDS[:, None].expand(-1, 4))


def test_at_lambda_0_a_step_has_the_error_of_one_step() -> None:
    values = VALUES[:, :3].nan_to_num()
    found = generalised_advantages(REWARDS, values, 0.5, 0.0)
    expected = torch.stack([0.5 * values[:, 1] - values[:, 0], 0.5 * values[:, 2] - values[:, 1]], 1)
    torch.testing.assert_close(found, torch.cat([expected, (REWARDS - values[:, 2])[:, None]], 1))


def test_at_lambda_1_the_baseline_is_the_value_of_the_step() -> None:
    found = generalised_advantages(REWARDS, VALUES, 1.0, 1.0)
    torch.testing.assert_close(found, REWARDS[:, None] - VALUES, equal_nan=True)


def test_inputs_are_not_written_and_their_dtype_is_kept() -> None:
    rewards, values = REWARDS.float(), VALUES.float()
    before = values.clone()
    assert generalised_advantages(rewards, values, 0.9, 0.9).dtype == torch.float32
    assert torch.equal(values.nan_to_num(), before.nan_to_num()) and torch.equal(rewards, REWARDS.float())
    with pytest.raises(ValueError, match=r"\[B, T\]"):
        generalised_advantages(rewards, values[0])
    with pytest.raises(ValueError, match="finite"):
        generalised_advantages(rewards * math.inf, values)


# --- the credit


def algorithm(residual: bool = False, n: int = 3, **keys: Any) -> FlowGRPO:
    config = Config(
        algorithm=algorithm_config("flow_ppo", **{"adv_estimator": "gae", "advantage_std": "none"} | keys),
        critic=CriticConfig(residual=residual),
        sampling=SamplingConfig(num_inference_steps=4),
        rollout=RolloutConfig(prompts_per_step=2, n=n),
    )
    found = build_algorithm(config)
    assert isinstance(found, FlowGRPO)
    return found


SCORED = training.rewards(training.samples_of([0, 0, 0, 1, 1, 1]), [0.0, 1.0, 2.0, 4.0, 4.0, 7.0])
OF_STEPS = torch.tensor([[1.0, 2.0, NAN, 0.5]] * 6)


def test_credit_by_values_is_the_estimate_clipped() -> None:
    a = algorithm(lam=0.5, gamma=0.9, advantage_clip=2.0)
    found = a.credit(replace(SCORED, values=OF_STEPS))
    torch.testing.assert_close(
        found, generalised_advantages(SCORED.totals, OF_STEPS, 0.9, 0.5).clamp(-2, 2), equal_nan=True
    )


def test_at_lambda_1_and_value_0_the_credit_is_that_of_reinforce() -> None:
    nothing = replace(SCORED, values=torch.zeros(6, 4))
    assert torch.equal(algorithm(lam=1.0).advantages(nothing), SCORED.totals[:, None].expand(-1, 4))
    whitened = algorithm(lam=1.0, advantage_std="batch").credit(nothing)
    torch.testing.assert_close(whitened, batch_advantages(SCORED.totals)[:, None].expand(-1, 4))


@pytest.mark.parametrize("std", ["batch", "group"])
def test_advantages_are_whitened_over_the_states_of_the_step_or_of_the_group(std: str) -> None:
    found = algorithm(advantage_std=std).credit(replace(SCORED, values=OF_STEPS))
    assert found[:, 2].isnan().all()
    for rows in (found,) if std == "batch" else (found[:3], found[3:]):
        known = rows[~rows.isnan()]
        assert float(known.mean()) == pytest.approx(0, abs=1e-6)
        assert float(known.std(correction=0)) == pytest.approx(1, abs=1e-3)


def test_before_there_are_values_the_baseline_is_the_mean_of_the_step_or_of_the_group() -> None:
    plain, residual = algorithm().credit(SCORED), algorithm(residual=True).credit(SCORED)
    assert torch.equal(plain[:, 0], batch_advantages(SCORED.totals))
    centred = group_advantages(SCORED.totals, SCORED.group_ids, "none")
    assert torch.equal(residual[:, 0], batch_advantages(centred))


def test_with_residual_values_are_of_the_reward_above_the_mean_of_the_group() -> None:
    a = algorithm(residual=True, lam=1.0)
    found = a.credit(replace(SCORED, values=torch.full((6, 4), 0.25)))
    assert found[:, 0].tolist() == pytest.approx([-1.25, -0.25, 0.75, -1.25, -1.25, 1.75])
    assert a.returns(SCORED).tolist() == pytest.approx([-1.0, 0.0, 1.0, -1.0, -1.0, 2.0])
