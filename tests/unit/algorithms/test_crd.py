"""CRD: the fixed point, the gradient in closed form, centring within groups only, the direction."""

import pytest
import torch

from gerl.algorithms.crd import CRD, crd_loss, implicit_reward
from gerl.algorithms.forward_process import Noised, group_mean
from gerl.config import Config, algorithm_config
from gerl.engine.kernels import FlowRule

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


def test_the_losses_follow_their_rows() -> None:
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    losses = crd_loss(IMPLICIT, ADVANTAGES, GROUPS, 0.7, CLIP)
    moved = crd_loss(IMPLICIT[order], ADVANTAGES[order], GROUPS[order], 0.7, CLIP)
    torch.testing.assert_close(moved, losses[order], rtol=1e-12, atol=1e-15)


def nearer_to_the_good(advantages: list[float], steps: int = 20) -> float:
    """How much nearer to the first of two images than to the second a velocity ends that starts between them."""
    target = torch.tensor([[-0.7, -0.7], [1.3, 1.3]])
    old = target.mean(0)
    theta = old.clone()
    for _ in range(steps):
        theta.requires_grad_()
        implicit = implicit_reward(theta.expand(2, 2), old.expand(2, 2), target)
        loss = crd_loss(implicit, torch.tensor(advantages), torch.zeros(2), 1.0, CLIP).mean()
        theta = (theta - 0.02 * torch.autograd.grad(loss, theta)[0]).detach()
    distances = (theta - target).norm(dim=1)
    return float(distances[1] - distances[0])


def test_the_model_moves_to_good_images_and_away_from_bad_ones() -> None:
    assert nearer_to_the_good([2.0, -2.0]) > 0.1
    assert nearer_to_the_good([-2.0, 2.0]) < -0.1
    assert nearer_to_the_good([2.0, 2.0]) == pytest.approx(0, abs=1e-6)


def test_the_model_stops_where_the_rewards_agree() -> None:
    assert nearer_to_the_good([2.0, -2.0], steps=400) == pytest.approx(nearer_to_the_good([2.0, -2.0], steps=800))


def test_the_settings_are_those_of_the_configuration() -> None:
    config = algorithm_config("crd", mix=0.5, advantage_clip=4.0)
    x0 = torch.zeros(6, 3, 2)
    noise = TARGET.float()  # x0 is 0, so that the noise is the target
    rule, advantages = FlowRule(0.6, 0.4, 0.4, 0.0), ADVANTAGES.float()
    s = Noised(rule, x0, noise, 0.6 * noise, OUTPUT.float(), OLD.float(), None, advantages, GROUPS)
    losses, metrics = CRD(Config(algorithm=config)).loss(s)
    implicit = implicit_reward(OUTPUT, OLD, TARGET)
    expected = crd_loss(implicit, ADVANTAGES, GROUPS, 0.5, 4.0).float()
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)
    assert metrics == {"implicit_reward": pytest.approx(float(implicit.mean()), rel=1e-4)}
    assert CRD.uses_old and CRD.needs_all_samples and not CRD.uses_reference
