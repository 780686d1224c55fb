"""Why losses on noised images blur a model of one step, and losses on its own steps do not: data that is -1 or 1."""

from typing import Any

import torch
from training import config

from gerl.algorithms import build_algorithm
from gerl.algorithms.core_algos import clipped_policy_loss, group_advantages
from gerl.algorithms.distillation import step_distance
from gerl.algorithms.forward_process import ForwardProcess, Noised
from gerl.engine import ReplayedStep
from gerl.engine.transitions import FlowRule, gaussian_log_prob

DRAWS = 4096
FIRST = FlowRule(1.0, 0.25, 0.25 * 0.5, 0.2)  # from pure noise, with some noise of its own


def generated(noise: torch.Tensor) -> torch.Tensor:
    """A distilled model, exact: half of the noise becomes 1, the other half -1."""
    return noise.sign()


def noise_of(seed: int) -> torch.Tensor:
    return torch.randn(DRAWS, 1, generator=torch.Generator().manual_seed(seed))


def test_regression_on_its_own_images_moves_a_one_step_model_to_their_mean() -> None:
    x0, noise = generated(noise_of(0)), noise_of(1)
    output = (noise - generated(noise)).requires_grad_()  # what the exact model says at sigma 1
    for name in ("rwr", "best_of_n", "diffusion_nft", "awm"):
        algorithm = build_algorithm(config(name, **({"off_policy": False} if name == "awm" else {})))
        assert isinstance(algorithm, ForwardProcess)
        ones: Any = torch.ones(DRAWS)
        s = Noised(FIRST, x0, noise, noise, output, output.detach(), output.detach(), ones, torch.zeros(DRAWS))
        loss, _ = algorithm.loss(s)
        (gradient,) = torch.autograd.grad(loss.sum(), output)
        # a step against it moves the image x - v of noise that becomes 1 down, and of noise that becomes -1 up: to 0
        moved = -(gradient * noise.sign()).mean()
        assert float(moved) > 0.1 * float(gradient.abs().mean()) > 0, name


def test_losses_on_its_own_steps_leave_it_where_all_its_images_are_as_good() -> None:
    noise = noise_of(1)
    output = (noise - generated(noise)).requires_grad_()
    mean = FIRST.mean(noise, output)
    x_next = mean.detach() + FIRST.std * noise_of(2)
    rewards = generated(noise).flatten() ** 2  # every image is as good as any other
    advantages = group_advantages(rewards, torch.arange(DRAWS) // 8)
    log_prob = gaussian_log_prob(x_next, mean, FIRST.std)
    losses, _ = clipped_policy_loss(log_prob, log_prob.detach(), advantages, 1e-4, 1e-4)
    (gradient,) = torch.autograd.grad(losses.sum(), output, retain_graph=True)
    assert not gradient.any()
    step = ReplayedStep(FIRST, noise, x_next, log_prob.detach(), None, output)
    (gradient,) = torch.autograd.grad(step_distance("gaussian", step, output.detach()).sum(), output)
    assert not gradient.any()
