"""DGPO: its gradient as that of the group preference it stands for, the weight, the stop."""

import math

import pytest
import torch
import torch.nn.functional as F
from training import noised

from gerl.algorithms.dgpo import DGPO, dgpo_loss, group_weight, stopped
from gerl.config import Config, algorithm_config

GENERATOR = torch.Generator().manual_seed(3)
ERROR, REFERENCE = (torch.rand(7, generator=GENERATOR, dtype=torch.float64) for _ in range(2))
ADVANTAGES = torch.tensor([-2.0, 1.0, 0.0, -0.5, 1.5, 0.7, -1.2], dtype=torch.float64)
GROUPS = torch.tensor([4, 9, 4, 9, 4, 9, 9])
FREE = torch.zeros(7, dtype=torch.bool)


def test_the_weight_by_hand() -> None:
    error, reference = torch.tensor([0.5, 0.2, 0.7]), torch.tensor([0.4, 0.4, 0.1])
    got = group_weight(error, reference, torch.tensor([1.0, -1.0, 3.0]), torch.tensor([0, 0, 1]), beta=10.0)
    # 10 * (0.1 + 0.2) / 2 and 10 * 3 * 0.6
    assert got.tolist() == pytest.approx([1 / (1 + math.exp(-1.5))] * 2 + [1 / (1 + math.exp(-18))])


def test_at_the_reference_the_weight_is_one_half() -> None:  # T29 (9f)
    error = REFERENCE.clone().requires_grad_()
    weight = group_weight(error, REFERENCE, ADVANTAGES, GROUPS, beta=100.0)
    assert weight.tolist() == [0.5] * 7 and not weight.requires_grad
    (slope,) = torch.autograd.grad(dgpo_loss(error, ADVANTAGES, weight, FREE).sum(), error)
    torch.testing.assert_close(slope, ADVANTAGES / 2)


def test_a_group_in_the_wrong_order_weighs_more_than_one_that_is_learnt() -> None:
    advantages, groups, reference = torch.tensor([1.0, -1.0]), torch.zeros(2), torch.full((2,), 0.5)
    wrong = group_weight(torch.tensor([0.6, 0.4]), reference, advantages, groups, beta=10.0)
    learnt = group_weight(torch.tensor([0.4, 0.6]), reference, advantages, groups, beta=10.0)
    assert (wrong > 0.7).all() and (learnt < 0.3).all()


@pytest.mark.parametrize("beta", [0.5, 20.0])
def test_the_gradient_is_that_of_the_group_preference_over_beta(beta: float) -> None:
    error, same = ERROR.clone().requires_grad_(), ERROR.clone().requires_grad_()
    weight = group_weight(error, REFERENCE, ADVANTAGES, GROUPS, beta)
    preference = torch.zeros((), dtype=torch.float64)
    for group in (4, 9):
        rows = GROUPS.eq(group)
        learnt = -beta * (ADVANTAGES[rows] * (same[rows] - REFERENCE[rows])).mean()
        preference = preference - int(rows.sum()) * F.logsigmoid(learnt)  # the rows' losses add up, not average
    (got,) = torch.autograd.grad(dgpo_loss(error, ADVANTAGES, weight, FREE).sum(), error)
    (expected,) = torch.autograd.grad(preference / beta, same)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)


def test_a_row_stops_that_has_left_the_clip_range_in_its_direction() -> None:
    old = torch.full((8,), 1.0, dtype=torch.float64)
    ratios = torch.tensor([1.3, 1.1, 0.5, 0.7, 0.9, 1.5, 0.1, 9.0], dtype=torch.float64)
    advantages = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0, 0.0, 0.0], dtype=torch.float64)
    error = (old - ratios.log()).requires_grad_()
    stop = stopped(error, old, advantages, clip_low=0.2, clip_high=0.2)
    assert stop.tolist() == [True, False, False, True, False, False, False, False]
    weight = torch.full((8,), 0.25, dtype=torch.float64)
    losses = dgpo_loss(error, advantages, weight, stop)
    torch.testing.assert_close(losses, 0.25 * advantages * error)  # the value is the same
    (slope,) = torch.autograd.grad(losses.sum(), error)
    torch.testing.assert_close(slope, torch.where(stop, 0.0, 0.25 * advantages))


def test_the_two_bounds_are_told_apart_and_nothing_stops_at_the_old_policy() -> None:
    old, advantages = torch.ones(2), torch.tensor([1.0, -1.0])
    error = old - torch.tensor([1.2, 0.8]).log()
    assert stopped(error, old, advantages, clip_low=0.1, clip_high=0.3).tolist() == [False, True]
    assert stopped(error, old, advantages, clip_low=0.3, clip_high=0.1).tolist() == [True, False]
    assert stopped(old, old, advantages, clip_low=1e-6, clip_high=1e-6).tolist() == [False, False]


def test_the_settings_are_those_of_the_configuration() -> None:
    config = algorithm_config("dgpo", beta=3.0, clip_low=0.05, clip_high=0.2)
    target, output, old, base = (torch.randn(7, 3, 2, generator=GENERATOR) for _ in range(4))
    advantages = ADVANTAGES.float()
    losses, metrics = DGPO(Config(algorithm=config)).loss(noised(output, target, advantages, GROUPS, old, base))
    error, before, reference = (((v - target) ** 2).mean((1, 2)) for v in (output, old, base))
    weight = group_weight(error, reference, advantages, GROUPS, 3.0)
    stop = stopped(error, before, advantages, 0.05, 0.2)
    torch.testing.assert_close(losses, weight * advantages * error)
    assert 0 < stop.sum() < 7
    assert metrics == {
        "group_weight": pytest.approx(float(weight.mean())),
        "stopped_fraction": pytest.approx(float(stop.double().mean())),
    }
