"""DiffusionNFT: a loss by hand and against a naive twin, its gradient at the old policy, its optimum."""

import math

import pytest
import torch

from gerl.algorithms.diffusion_nft import DiffusionNFT, adaptive_error, implicit_policies, nft_loss, optimality
from gerl.algorithms.forward_process import Noised
from gerl.config import Config, algorithm_config
from gerl.engine.transitions import DDIMRule, FlowRule, Rule

SIGMA, CLIP = 0.6, 5.0
GENERATOR = torch.Generator().manual_seed(0)
X0, NOISE, OUTPUT, OLD = (torch.randn(6, 3, 2, generator=GENERATOR, dtype=torch.float64) for _ in range(4))
X = (1 - SIGMA) * X0 + SIGMA * NOISE
ADVANTAGES = torch.tensor([-7.0, -2.0, 0.0, 0.5, 3.0, 9.0], dtype=torch.float64)


def clean(output: torch.Tensor) -> torch.Tensor:
    return X - SIGMA * output


def gradient(output: torch.Tensor, advantages: torch.Tensor, mix: float) -> torch.Tensor:
    output = output.clone().requires_grad_()
    return torch.autograd.grad(nft_loss(clean, X0, output, OLD, advantages, mix, CLIP).sum(), output)[0]


def test_the_loss_of_one_pixel_by_hand() -> None:
    x0, output, old = torch.tensor([[[1.0]], [[-1.2]], [[-1.4]]]).unbind()
    got = nft_loss(lambda v: 0.5 - 0.5 * v, x0, output, old, torch.tensor([2.5]), mix=0.5, clip=CLIP)
    # r = 0.75; v+ = -1.3, x0+ = 1.15, error 0.15; v- = -1.5, x0- = 1.25, error 0.25; |e|^2 / |e| = |e|
    assert got.tolist() == pytest.approx([5 / 0.5 * (0.75 * 0.15 + 0.25 * 0.25)])


@pytest.mark.parametrize("mix", [0.1, 1.0, 2.0])
def test_the_loss_equals_its_naive_twin(mix: float) -> None:
    def error(row: int, sign: int) -> float:
        x, x0, v, old = (values[row].flatten().tolist() for values in (X, X0, OUTPUT, OLD))
        mixed = [(1 - sign * mix) * o + sign * mix * u for u, o in zip(v, old, strict=True)]
        differences = [a - SIGMA * m - b for a, m, b in zip(x, mixed, x0, strict=True)]
        return sum(d * d for d in differences) / max(sum(map(abs, differences)), 6e-5)

    expected = []
    for row, advantage in enumerate(ADVANTAGES.tolist()):
        good = min(max(advantage / 10 + 0.5, 0), 1)
        expected.append(5 / mix * (good * error(row, 1) + (1 - good) * error(row, -1)))
    got = nft_loss(clean, X0, OUTPUT, OLD, ADVANTAGES, mix, CLIP)
    assert got.tolist() == pytest.approx(expected, rel=1e-12)
    assert (got >= 0).all()


def test_the_weight_of_an_error_is_its_size_down_to_the_smallest_one() -> None:
    """As the authors' code, which divides by at least 1e-5."""
    data = torch.zeros(3, 2, dtype=torch.float64)
    error = torch.tensor([[3e-4, -1e-4], [0.3, -0.1], [2e-6, 2e-6]], dtype=torch.float64)
    expected = [5e-8 / 2e-4, 0.05 / 0.2, 4e-12 / 1e-5]
    assert adaptive_error(error, data).tolist() == pytest.approx(expected, rel=1e-9)


def test_advantages_saturate_at_the_clip() -> None:  # T28
    advantages = torch.tensor([-9.0, -5.0, -2.5, 0.0, 1.0, 5.0, 6.0])
    torch.testing.assert_close(optimality(advantages, 5.0), torch.tensor([0, 0, 0.25, 0.5, 0.6, 1, 1]))
    torch.testing.assert_close(optimality(advantages, 2.5), torch.tensor([0, 0, 0, 0.5, 0.7, 1, 1]))


@pytest.mark.parametrize("mix", [0.1, 1.0, 3.0])
def test_the_gradient_at_the_old_policy_is_that_of_weighted_flow_matching_whatever_b(mix: float) -> None:  # T28 (9a)
    good = (ADVANTAGES / 10 + 0.5).clamp(0, 1).view(-1, 1, 1)
    error = clean(OLD) - X0
    matching = 2 / 6 * error * -SIGMA / error.abs().mean((1, 2), keepdim=True)
    got = gradient(OLD, ADVANTAGES, mix)
    torch.testing.assert_close(got, (2 * good - 1) * CLIP * matching, rtol=1e-9, atol=1e-12)
    assert (got[2].abs() < 1e-12).all() and got[0].abs().max() > 0.1  # advantage 0, that is r = 1/2


@pytest.mark.parametrize("mix", [0.5, 2.0])
def test_the_unweighted_optimum_improves_the_old_policy_by_two_over_b(mix: float) -> None:  # T28 (9b)
    velocities = torch.randn(50, 4, generator=GENERATOR, dtype=torch.float64)  # those that lead to the same x_s
    good = torch.rand(50, 1, generator=GENERATOR, dtype=torch.float64)
    old = velocities.mean(0)

    def slope(at: torch.Tensor) -> torch.Tensor:
        at = at.clone().requires_grad_()
        positive, negative = implicit_policies(at, old, mix)
        loss = good * (positive - velocities) ** 2 + (1 - good) * (negative - velocities) ** 2
        return torch.autograd.grad(loss.mean(), at)[0]

    optimum = old + 2 / mix * (good * (velocities - old)).mean(0)
    torch.testing.assert_close(slope(optimum), torch.zeros_like(optimum), rtol=0, atol=1e-12)
    assert slope(old).abs().max() > 1e-3


def test_without_advantage_the_loss_pulls_back_to_the_old_policy() -> None:
    perfect = (X - X0) / SIGMA
    away = (perfect + 0.3).requires_grad_()
    loss = nft_loss(clean, X0, away, perfect, torch.zeros(6, dtype=torch.float64), 1.0, CLIP)
    (slope,) = torch.autograd.grad(loss.sum(), away)
    assert (slope > 0.01).all()


def test_old_policy_and_weights_are_constants() -> None:
    output, old, x0 = (values.clone().requires_grad_() for values in (OUTPUT, OLD, X0))
    nft_loss(clean, x0.detach(), output, old, ADVANTAGES, 1.0, CLIP).sum().backward()
    assert old.grad is None and output.grad is not None
    error = torch.tensor([[0.3, -0.1]], dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(adaptive_error(error, torch.zeros(1, 2, dtype=torch.float64)).sum(), error)
    torch.testing.assert_close(slope, error.detach() / 0.2)  # 2 e / D over the constant mean |e|


def test_a_perfect_prediction_has_no_error_and_a_finite_gradient() -> None:
    prediction = X0.clone().requires_grad_()
    errors = adaptive_error(prediction, X0)
    errors.sum().backward()
    assert errors.tolist() == [0.0] * 6 and prediction.grad is not None and not prediction.grad.any()


# --- the class


def ddim(prediction_type: str) -> DDIMRule:
    return DDIMRule(SIGMA, 0.4, math.sqrt(1 - SIGMA**2), math.sqrt(0.84), 0.4, 0.0, prediction_type, None)


def noised(rule: Rule, output: torch.Tensor, old: torch.Tensor) -> Noised:
    return Noised(rule, X0, NOISE, rule.noised(X0, NOISE), output, old, None, ADVANTAGES, torch.zeros(6))


def test_the_settings_are_those_of_the_configuration() -> None:
    algorithm = DiffusionNFT(Config(algorithm=algorithm_config("diffusion_nft", mix=0.5, advantage_clip=4.0)))
    losses, metrics = algorithm.loss(noised(FlowRule(SIGMA, 0.4, 0.4, 0.0), OUTPUT, OLD))
    torch.testing.assert_close(losses, nft_loss(clean, X0, OUTPUT, OLD, ADVANTAGES, 0.5, 4.0))
    assert metrics == {"old_distance": pytest.approx(float(((OUTPUT - OLD) ** 2).mean()))}


def test_epsilon_and_v_prediction_have_the_same_loss() -> None:
    algorithm = DiffusionNFT(Config(algorithm=algorithm_config("diffusion_nft", mix=0.5)))
    a, s = math.sqrt(1 - SIGMA**2), SIGMA
    x = a * X0 + s * NOISE
    # one prediction of x0 each, said in the three ways
    epsilon = [(x - a * predicted) / s for predicted in (OUTPUT, OLD)]
    velocity = [(a * x - predicted) / s for predicted in (OUTPUT, OLD)]
    expected, _ = algorithm.loss(noised(ddim("sample"), OUTPUT, OLD))
    for prediction_type, (output, old) in {"epsilon": epsilon, "v_prediction": velocity}.items():
        losses, _ = algorithm.loss(noised(ddim(prediction_type), output, old))
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
