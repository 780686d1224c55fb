"""Online Diffusion-DPO: the loss of a pair and its gradient, pairs within groups only."""

import math

import pytest
import torch
from training import noised, rewards, samples_of

from gerl.algorithms.diffusion_dpo import DiffusionDPO, dpo_loss, paired, preference_margin
from gerl.config import Config, algorithm_config

GENERATOR = torch.Generator().manual_seed(4)
EXCESS = torch.randn(8, generator=GENERATOR, dtype=torch.float64)
# group 4: rows 0 and 6; group 9: rows 5 and 1; group 7 has no pair; group 2 has lost its winner
GROUPS = torch.tensor([4, 9, 7, 4, 7, 9, 4, 2])
PREFERENCES = torch.tensor([1, -1, 0, 0, 0, 1, -1, -1], dtype=torch.float64)
PAIRS = [(0, 6), (5, 1)]


def pair_losses(excess: torch.Tensor, preferences: torch.Tensor, groups: torch.Tensor, beta: float) -> torch.Tensor:
    return dpo_loss(preference_margin(excess, preferences, groups), paired(preferences, groups), beta)


@pytest.mark.parametrize("beta", [2.0, 100.0])
def test_at_the_reference_a_pair_costs_ln_two_and_pulls_with_a_quarter_of_beta(beta: float) -> None:  # T29 (9e)
    excess = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    losses = pair_losses(excess, torch.tensor([1.0, -1.0]), torch.zeros(2), beta)
    assert losses.tolist() == pytest.approx([math.log(2) / 2] * 2)
    (slope,) = torch.autograd.grad(losses.sum(), excess)
    assert slope.tolist() == pytest.approx([beta / 4, -beta / 4])


def test_the_rows_of_a_pair_share_its_loss_and_others_have_none() -> None:
    beta, expected = 3.0, [0.0] * 8
    for winner, loser in PAIRS:
        gap = float(EXCESS[winner] - EXCESS[loser])
        expected[winner] = expected[loser] = math.log(1 + math.exp(beta / 2 * gap)) / 2
    assert pair_losses(EXCESS, PREFERENCES, GROUPS, beta).tolist() == pytest.approx(expected)
    assert paired(PREFERENCES, GROUPS).tolist() == [value > 0 for value in expected]


def test_the_gradient_in_closed_form() -> None:
    beta, expected = 3.0, [0.0] * 8
    for winner, loser in PAIRS:
        wrong = 1 / (1 + math.exp(-beta / 2 * float(EXCESS[winner] - EXCESS[loser])))  # how wrong the order still is
        expected[winner], expected[loser] = beta / 2 * wrong, -beta / 2 * wrong
    excess = EXCESS.clone().requires_grad_()
    (slope,) = torch.autograd.grad(pair_losses(excess, PREFERENCES, GROUPS, beta).sum(), excess)
    assert slope.tolist() == pytest.approx(expected)


def test_a_batch_without_pairs_costs_nothing() -> None:
    excess = EXCESS.clone().requires_grad_()
    losses = pair_losses(excess, torch.zeros(8, dtype=torch.float64), GROUPS, 100.0)
    losses.sum().backward()
    assert losses.tolist() == [0.0] * 8 and excess.grad is not None and not excess.grad.any()


def test_only_the_sign_of_a_preference_counts() -> None:
    losses = pair_losses(EXCESS, PREFERENCES, GROUPS, 3.0)
    assert torch.equal(pair_losses(EXCESS, 0.3 * PREFERENCES, GROUPS, 3.0), losses)


def test_large_errors_stay_finite() -> None:
    excess = torch.tensor([50.0, -50.0], requires_grad=True)
    losses = pair_losses(excess, torch.tensor([1.0, -1.0]), torch.zeros(2), 5000.0)
    losses.sum().backward()
    assert losses.tolist() == [125000.0] * 2 and excess.grad is not None
    assert excess.grad.tolist() == [2500.0, -2500.0]


# --- the class


def test_the_credit_is_the_best_against_the_worst_of_each_group() -> None:
    samples = samples_of([0, 1, 0, 0, 1, 0])
    algorithm = DiffusionDPO(Config(algorithm=algorithm_config("diffusion_dpo")))
    assert algorithm.advantages(rewards(samples, [0.1, 5.0, 0.9, 0.5, 5.0, 0.5])).tolist() == [-1, 0, 1, 0, 0, 0]


def test_the_reference_is_the_old_policy_and_the_settings_are_those_of_the_configuration() -> None:
    target, output, old, base = (torch.randn(8, 3, 2, generator=GENERATOR) for _ in range(4))
    preferences, settings = PREFERENCES.float(), algorithm_config("diffusion_dpo", beta=7.0)
    s = noised(output, target, preferences, GROUPS, old, base)
    losses, metrics = DiffusionDPO(Config(algorithm=settings)).loss(s)
    excess = ((output - target) ** 2).mean((1, 2)) - ((old - target) ** 2).mean((1, 2))
    torch.testing.assert_close(losses, pair_losses(excess, preferences, GROUPS, 7.0))
    margins = [float(excess[loser] - excess[winner]) for winner, loser in PAIRS]
    assert metrics == {"preference_margin": pytest.approx(2 * sum(margins) / 8, rel=1e-4)}
    assert preference_margin(excess, preferences, GROUPS)[[0, 5]].tolist() == pytest.approx(margins, rel=1e-5)
