"""CRD: the fixed point, the gradient in closed form, centring within groups only."""

import math

import pytest
import torch
from training import noised

from gerl.algorithms.crd import CRD, crd_loss, implicit_reward, relative_entropy
from gerl.algorithms.forward_process import group_mean
from gerl.config import Config, algorithm_config

CLIP = 5.0
GENERATOR = torch.Generator().manual_seed(2)
OUTPUT, OLD, TARGET = (torch.randn(6, 3, 2, generator=GENERATOR, dtype=torch.float64) for _ in range(3))
IMPLICIT = torch.randn(6, generator=GENERATOR, dtype=torch.float64)
ADVANTAGES = torch.tensor([-2.0, 1.0, 0.0, 6.0, 1.5, -7.0], dtype=torch.float64)
GROUPS = torch.tensor([4, 9, 4, 9, 4, 9])


def centred(values: torch.Tensor) -> torch.Tensor:
    result = values.clone()
    for group in (4, 9):
        result[GROUPS.eq(group)] -= values[GROUPS.eq(group)].mean()
    return result


def test_the_mean_of_a_group_stays_within_it() -> None:
    values = torch.tensor([1.0, 10.0, 2.0, 20.0, 6.0, float("inf")])
    assert group_mean(values, GROUPS).tolist() == [3, float("inf"), 3, float("inf"), 3, float("inf")]


def test_the_implicit_reward_by_hand() -> None:
    target = torch.zeros(1, 2)
    # errors (0.3, -0.1): mean square 0.05 over mean size 0.2; errors (0.4, 0.4): 0.16 over 0.4
    output, old = torch.tensor([[0.3, -0.1]]), torch.tensor([[0.4, 0.4]])
    assert implicit_reward(output, old, target).tolist() == pytest.approx([-(0.05 / 0.2 - 0.16 / 0.4)])
    assert implicit_reward(old, old, target).tolist() == [0.0]


def test_the_loss_by_hand() -> None:
    got = crd_loss(torch.tensor([0.3, 0.1]), torch.tensor([5.0, -2.5]), torch.tensor([0, 0]), 2.0, CLIP)
    # advantages 1 and 0.25, centred +-0.375; implicit rewards centred +-0.1, times 2
    assert got.tolist() == pytest.approx([5 / 2 * (0.2 - 0.375) ** 2] * 2)


@pytest.mark.parametrize("mix", [0.5, 2.0])
def test_the_loss_is_zero_if_and_only_if_the_centred_rewards_agree(mix: float) -> None:  # T29 (9g)
    wanted = (ADVANTAGES / 10 + 0.5).clamp(0, 1)
    shift = torch.where(GROUPS == 4, 3.0, -1.0)  # the normalising constants of two prompts
    implicit = (wanted / mix + shift).requires_grad_()
    losses = crd_loss(implicit, ADVANTAGES, GROUPS, mix, CLIP)
    (slope,) = torch.autograd.grad(losses.sum(), implicit)
    assert losses.max() < 1e-20 and slope.abs().max() < 1e-12
    for row in range(6):
        other = implicit.detach().clone()
        other[row] += 0.1
        losses = crd_loss(other, ADVANTAGES, GROUPS, mix, CLIP)
        assert torch.equal(losses > 1e-4, GROUPS[row] == GROUPS)


@pytest.mark.parametrize("mix", [0.5, 2.0])
def test_the_gradient_in_closed_form(mix: float) -> None:
    implicit = IMPLICIT.clone().requires_grad_()
    wanted = (ADVANTAGES / 10 + 0.5).clamp(0, 1)
    losses = crd_loss(implicit, ADVANTAGES, GROUPS, mix, CLIP)
    excess = mix * centred(IMPLICIT) - centred(wanted)
    torch.testing.assert_close(losses, CLIP / mix * excess**2, rtol=1e-12, atol=1e-15)
    # that of the group's mean vanishes: the excesses of a group sum to 0
    torch.testing.assert_close(torch.autograd.grad(losses.sum(), implicit)[0], 2 * CLIP * excess, rtol=1e-12, atol=0)


def test_the_gradient_at_the_old_policy_weighs_flow_matching_with_the_centred_advantage() -> None:
    output, old = OLD.clone().requires_grad_(), OLD.clone().requires_grad_()
    crd_loss(implicit_reward(output, old, TARGET), ADVANTAGES, GROUPS, 0.5, CLIP).sum().backward()
    error = OLD - TARGET
    matching = 2 / 6 * error / error.abs().mean((1, 2), keepdim=True)
    factors = 2 * CLIP * centred((ADVANTAGES / 10 + 0.5).clamp(0, 1))
    assert output.grad is not None and old.grad is None
    torch.testing.assert_close(output.grad, factors.view(-1, 1, 1) * matching, rtol=1e-9, atol=1e-12)


# --- the form with a cross-entropy


def cross_entropy(implicit: torch.Tensor, mix: float) -> torch.Tensor:
    return crd_loss(implicit, ADVANTAGES, GROUPS, mix, CLIP, regression="cross_entropy")


@pytest.mark.parametrize("mix", [0.5, 2.0])
def test_the_gradient_of_the_cross_entropy_in_closed_form(mix: float) -> None:
    implicit = IMPLICIT.clone().requires_grad_()
    losses = cross_entropy(implicit, mix)
    wanted = centred((ADVANTAGES / 10 + 0.5).clamp(0, 1))
    slope = CLIP * ((mix * centred(IMPLICIT)).sigmoid() - wanted.sigmoid())
    torch.testing.assert_close(torch.autograd.grad(losses.sum(), implicit)[0], slope, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("mix", [0.5, 2.0])
def test_the_published_form_but_for_the_entropy_of_what_is_wanted(mix: float) -> None:
    """A naive twin, in a loop: as published, with a mean that has no gradient."""
    implicit, twin = IMPLICIT.clone().requires_grad_(), IMPLICIT.clone().requires_grad_()
    wanted, total, entropies = (ADVANTAGES / 10 + 0.5).clamp(0, 1), torch.zeros(()), []
    for row in range(6):
        group = GROUPS[row] == GROUPS
        logit = mix * (twin[row] - twin[group].mean().detach())
        goal = torch.sigmoid(wanted[row] - wanted[group].mean())
        total = total + CLIP / mix * torch.nn.functional.binary_cross_entropy_with_logits(logit, goal)
        entropies.append(-CLIP / mix * (goal * goal.log() + (1 - goal) * (1 - goal).log()))
    losses = cross_entropy(implicit, mix)
    torch.testing.assert_close(losses.sum(), total - torch.stack(entropies).sum(), rtol=1e-9, atol=1e-9)
    grads = [torch.autograd.grad(value, x)[0] for value, x in ((losses.sum(), implicit), (total, twin))]
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("mix", [0.5, 2.0])
def test_the_cross_entropy_has_the_same_fixed_point(mix: float) -> None:
    wanted = (ADVANTAGES / 10 + 0.5).clamp(0, 1)
    implicit = (wanted / mix + torch.where(GROUPS == 4, 3.0, -1.0)).requires_grad_()
    losses = cross_entropy(implicit, mix)
    (slope,) = torch.autograd.grad(losses.sum(), implicit)
    assert losses.abs().max() < 1e-12 and slope.abs().max() < 1e-12
    assert cross_entropy(implicit.detach() + 0.1 * torch.tensor([1, 0, 0, 1, 0, 0]), mix).min() > 1e-5


def test_the_kl_counts_more_for_better_images_by_hand() -> None:
    crd = CRD(Config(algorithm=algorithm_config("crd", kl_coef=0.5, kl_by_reward=True, advantage_clip=CLIP)))
    found = crd.kl_weights(noised(OUTPUT, TARGET, ADVANTAGES, GROUPS, OLD))
    good = [min(max(a / 10 + 0.5, 0), 1) for a in ADVANTAGES.tolist()]
    assert isinstance(found, torch.Tensor)
    assert found.tolist() == pytest.approx([r + (1 - r) * 1e-4 / 0.5 for r in good])


def test_small_errors_are_divided_by_their_own_size() -> None:
    target = torch.zeros(1, 2, dtype=torch.float64)
    small = torch.tensor([[3e-4, -1e-4]], dtype=torch.float64)  # mean square 5e-8 over mean size 2e-4
    assert implicit_reward(small, target, target).tolist() == pytest.approx([-5e-8 / 2e-4], rel=1e-9)


def test_relative_entropy_by_hand() -> None:
    p, q = 0.8, 0.4
    logits = [torch.tensor([value]).logit() for value in (p, q)]
    expected = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    assert relative_entropy(*logits).tolist() == pytest.approx([expected])


def test_the_settings_are_those_of_the_configuration() -> None:
    config = algorithm_config("crd", mix=0.5, advantage_clip=4.0)
    losses, metrics = CRD(Config(algorithm=config)).loss(noised(OUTPUT, TARGET, ADVANTAGES, GROUPS, OLD))
    implicit = implicit_reward(OUTPUT, OLD, TARGET)
    torch.testing.assert_close(losses, crd_loss(implicit, ADVANTAGES, GROUPS, 0.5, 4.0))
    assert metrics == {"implicit_reward": pytest.approx(float(implicit.mean()))}
    other = algorithm_config("crd", mix=0.5, advantage_clip=4.0, regression="cross_entropy")
    losses, _ = CRD(Config(algorithm=other)).loss(noised(OUTPUT, TARGET, ADVANTAGES, GROUPS, OLD))
    expected = crd_loss(implicit, ADVANTAGES, GROUPS, 0.5, 4.0, regression="cross_entropy")
    torch.testing.assert_close(losses, expected)
