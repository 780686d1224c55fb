"""Weighted regression: value and gradient, the weights of the two classes."""

import math

import pytest
import torch
from training import noised, rewards, samples_of

from gerl.algorithms.forward_process import Noised
from gerl.algorithms.regression import BestOfN, RewardWeightedRegression
from gerl.config import Config, algorithm_config
from gerl.engine.kernels import FlowRule

GENERATOR = torch.Generator().manual_seed(5)
OUTPUT, TARGET = (torch.randn(4, 3, 2, generator=GENERATOR) for _ in range(2))
WEIGHTS = torch.tensor([0.0, 1.0, 0.3, 2.7])
RWR = RewardWeightedRegression(Config(algorithm=algorithm_config("rwr", beta=2.0)))
BEST = BestOfN(Config(algorithm=algorithm_config("best_of_n")))


def loss(output: torch.Tensor, target: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return BEST.loss(noised(output, target, weights))[0]


def test_the_loss_is_the_weighted_mean_squared_error_of_each_row() -> None:
    output = torch.tensor([[[1.0, 2.0]], [[0.0, 0.0]]])
    target = torch.tensor([[[0.0, 0.0]], [[3.0, 1.0]]])
    assert loss(output, target, torch.tensor([0.5, 2.0])).tolist() == [1.25, 10.0]


def test_the_gradient_in_closed_form() -> None:
    output = OUTPUT.clone().requires_grad_()
    (got,) = torch.autograd.grad(loss(output, TARGET, WEIGHTS).sum(), output)
    torch.testing.assert_close(got, WEIGHTS.view(-1, 1, 1) * 2 / 6 * (OUTPUT - TARGET), rtol=1e-6, atol=1e-7)


def test_the_optimum_is_the_weighted_mean_of_the_targets() -> None:
    optimum = (WEIGHTS.view(-1, 1, 1) * TARGET).sum(0) / WEIGHTS.sum()
    theta = optimum.clone().requires_grad_()
    loss(theta.expand(4, 3, 2), TARGET, WEIGHTS).sum().backward()
    assert theta.grad is not None and theta.grad.abs().max() < 1e-5


@pytest.mark.parametrize("beta", [0.5, 2.0])
def test_rewards_weigh_by_the_softmax_of_beta_times_the_advantage(beta: float) -> None:
    algorithm = RewardWeightedRegression(Config(algorithm=algorithm_config("rwr", beta=beta)))
    got = algorithm.advantages(rewards(samples_of([0, 0, 1, 1]), [3.0, 1.0, 7.0, 7.0]))
    high, low = math.exp(beta / 1.0001), math.exp(-beta / 1.0001)  # advantages +-1 / (1 + 1e-4)
    assert got.tolist() == pytest.approx([2 * high / (high + low), 2 * low / (high + low), 0, 0])


def test_best_of_n_keeps_the_best_of_each_group() -> None:
    given = rewards(samples_of([0, 1, 0, 2, 1, 2]), [0.1, 5.0, 0.9, 0.5, 5.0, 0.2])
    assert BEST.advantages(given).tolist() == [0, 0, 1, 1, 0, 0]


@pytest.mark.parametrize("algorithm", [RWR, BEST], ids=["rwr", "best_of_n"])
def test_the_classes_regress_to_the_clean_latents(algorithm: RewardWeightedRegression | BestOfN) -> None:
    x0, noise, output = (torch.randn(4, 3, 2, generator=GENERATOR) for _ in range(3))
    rule = FlowRule(0.6, 0.4, 0.4, 0.0)
    s = Noised(rule, x0, noise, rule.noised(x0, noise), output, None, None, WEIGHTS, torch.zeros(4))
    losses, metrics = algorithm.loss(s)
    errors = ((output - (noise - x0)) ** 2).mean((1, 2))
    torch.testing.assert_close(losses, WEIGHTS * errors)
    assert metrics == {"squared_error": pytest.approx(float(errors.mean()))}
