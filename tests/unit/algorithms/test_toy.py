"""The update's mathematics at work on Gaussians: a policy learns in seconds, and how much numerical noise it meets."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
import torch
from schedules import along, sd3_sigmas

from gerl.algorithms.core_algos import (
    batch_advantages,
    clipped_policy_loss,
    gaussian_kl,
    group_advantages,
    guard_log_ratio,
    masked_policy_loss,
    step_weights,
)
from gerl.engine.transitions import gaussian_log_prob, transition_mean

SIGMAS = sd3_sigmas(10)
SIZE, GROUPS, GROUP, VARIANCE, GOAL = 16, 4, 24, 0.25, 0.6
MEMBERS = torch.arange(GROUPS).repeat_interleave(GROUP)
LATENTS = 16 * 64 * 64  # of a 512-pixel image of Stable Diffusion 3


def loss_of(
    name: str,
    log_probs: tuple[torch.Tensor, torch.Tensor],
    means: tuple[torch.Tensor, torch.Tensor],
    advantages: torch.Tensor,
    std: float,
) -> torch.Tensor:
    """Loss of a step; log-probs and means are those of the trained and of the old policy."""
    match name:
        case "clipped":
            return clipped_policy_loss(*log_probs, advantages, 1e-4, 1e-4)[0].mean()
        case "guard":
            log_ratio = guard_log_ratio(*log_probs, *means, std)
            return clipped_policy_loss(log_ratio, torch.zeros_like(log_ratio), advantages, 0.01, 0.01)[0].mean()
        case _:
            return masked_policy_loss(*log_probs, advantages, gaussian_kl(*means, std), 1e-2)[0].mean()


def learn(
    kernel: str,
    noise_level: float,
    window: Sequence[int],
    loss: str = "clipped",
    advantages: Callable[[torch.Tensor], torch.Tensor] = lambda rewards: group_advantages(rewards, MEMBERS),
    weights: Sequence[float] = (1.0,) * 9,
    updates: int = 1,
    iterations: int = 60,
) -> list[float]:
    """Mean reward of each iteration: data N(0, VARIANCE), its exact velocity plus a trained bias per step and dim."""
    generator = torch.Generator().manual_seed(0)
    bias = torch.zeros(len(SIGMAS) - 1, SIZE, requires_grad=True)
    optimizer = torch.optim.AdamW([bias], lr=2e-2)
    table = along(SIGMAS, kernel, noise_level)
    steps = [both if k in window else (SIGMAS[k + 1], 0.0) for k, both in enumerate(table)]

    def mean_at(k: int, x: torch.Tensor) -> torch.Tensor:
        s, s2 = SIGMAS[k], SIGMAS[k + 1]
        slope = (s - (1 - s) * VARIANCE) / ((1 - s) ** 2 * VARIANCE + s**2)
        return transition_mean(x, slope * x + bias[k], s, s2, steps[k][0])

    curve = []
    for _ in range(iterations):
        x = torch.randn(GROUPS * GROUP, SIZE, generator=generator)
        tape = []
        for k, (_, std) in enumerate(steps):
            mean = mean_at(k, x).detach()
            x_next = mean + std * torch.randn(x.shape, generator=generator)
            tape.append((x, x_next, mean))
            x = x_next
        rewards = -((x - GOAL) ** 2).mean(1)
        curve.append(rewards.mean().item())
        signal = advantages(rewards)
        for _ in range(updates):
            optimizer.zero_grad()
            for k in window:
                (x, x_next, old), std = tape[k], steps[k][1]
                mean = mean_at(k, x)
                log_probs = gaussian_log_prob(x_next, mean, std), gaussian_log_prob(x_next, old, std)
                (weights[k] * loss_of(loss, log_probs, (mean, old), signal, std)).backward()
            optimizer.step()
    return curve


@pytest.mark.parametrize(
    ("kernel", "noise_level", "window", "start", "end"),
    [
        ("flow_sde", 0.7, range(9), -0.53, -0.19),
        ("cps", 0.8, range(9), -0.45, -0.15),
        ("precise", 0.7, range(9), -0.48, -0.20),
        ("flow_sde", 0.7, (1, 2, 3), -0.54, -0.45),
        ("cps", 0.8, (1, 2, 3), -0.51, -0.39),
    ],
)
def test_every_kernel_learns(
    kernel: str, noise_level: float, window: Sequence[int], start: float, end: float
) -> None:  # T38
    curve = learn(kernel, noise_level, window)
    assert curve[0] == pytest.approx(start, abs=0.05)
    assert sum(curve[-5:]) / 5 == pytest.approx(end, abs=0.03)


STDS, DTS = [std for _, std in along(SIGMAS, "flow_sde", 0.7)[:9]], [s2 - s for s, s2 in pairwise(SIGMAS)][:9]
INVERSE_DT, STD = (step_weights(kind, STDS, DTS, [1.0] * 9) for kind in ("inverse_dt", "std"))


@pytest.mark.parametrize(
    "options",
    [
        {"loss": "guard", "weights": INVERSE_DT, "updates": 2},
        {"loss": "masked", "updates": 2},
        {"weights": STD},
        {"advantages": batch_advantages},
        {"advantages": lambda rewards: group_advantages(rewards, MEMBERS, "none", leave_one_out=True)},
    ],
    ids=["guard", "masked", "weighted", "batch", "leave_one_out"],
)
def test_every_variant_of_the_update_learns(options: dict) -> None:  # T38
    curve = learn("flow_sde", 0.7, range(9), **options, iterations=60 // options.get("updates", 1))
    assert curve[0] == pytest.approx(-0.53, abs=0.03)
    assert sum(curve[-5:]) / 5 > -0.25


def test_negated_rewards_lead_away() -> None:
    curve = learn(
        "flow_sde", 0.7, range(9), advantages=lambda rewards: group_advantages(-rewards, MEMBERS), iterations=20
    )
    assert curve[-1] < curve[0] - 0.2


# --- numerical noise of log-probs, in which a clip range drowns


def image_step(k: int, kernel: str, noise_level: float, samples: int) -> tuple[torch.Tensor, ...]:
    """Latents of the SD3 schedule's step `k`: x, velocity, mean and drawn x'."""
    generator = torch.Generator().manual_seed(k)
    s, s2 = SIGMAS[k], SIGMAS[k + 1]
    kappa, std = along(SIGMAS, kernel, noise_level)[k]
    clean, noise, z = (torch.randn(samples, LATENTS, generator=generator) for _ in range(3))
    x, velocity = (1 - s) * clean + s * noise, noise - clean
    mean = transition_mean(x, velocity, s, s2, kappa)
    return x, velocity, mean, mean + std * z


@pytest.mark.parametrize(("dtype", "low", "high"), [(torch.bfloat16, 4e-6, 4e-5), (torch.float16, 4e-7, 5e-6)])
def test_rounding_after_scoring_moves_log_probs_as_far_as_a_clip_range(
    dtype: torch.dtype, low: float, high: float
) -> None:  # T40
    for k in range(9):
        std = along(SIGMAS, "flow_sde", 0.7)[k][1]
        *_, mean, x_next = image_step(k, "flow_sde", 0.7, 4)
        stored = x_next.to(dtype)
        deviation = (gaussian_log_prob(stored, mean, std) - gaussian_log_prob(x_next, mean, std)).abs()
        assert low < deviation.mean() < high
        kept = stored.float()  # rounded before it was scored
        assert torch.equal(gaussian_log_prob(stored, mean, std), gaussian_log_prob(kept, mean, std))


@pytest.mark.parametrize("kernel", ["cps", "precise"])
def test_the_last_steps_of_cps_and_precise_are_too_narrow_for_half_precision(kernel: str) -> None:  # T40
    std = along(SIGMAS, kernel, 0.8)[8][1]
    assert std < 0.01
    *_, mean, x_next = image_step(8, kernel, 0.8, 2)
    deviation = gaussian_log_prob(x_next.bfloat16(), mean, std) - gaussian_log_prob(x_next, mean, std)
    assert (deviation < -5e-3).all()


def test_a_rollout_engine_that_differs_by_one_percent_moves_log_probs_as_predicted() -> None:  # T40
    samples, relative = 24, 0.01
    golden = [0.057, 0.078, 0.129, 0.188, 0.264, 0.371, 0.536, 0.825, 1.487]  # |J| / std
    for k, q in enumerate(golden):
        s, s2 = SIGMAS[k], SIGMAS[k + 1]
        kappa, std = along(SIGMAS, "flow_sde", 0.7)[k]
        assert abs(kappa * (1 - s) - (1 - s2) * s) / std == pytest.approx(q, abs=1e-3)
        x, velocity, mean, x_next = image_step(k, "flow_sde", 0.7, samples)
        error = relative * torch.randn(velocity.shape, generator=torch.Generator().manual_seed(100 + k))
        other = transition_mean(x, velocity + error, s, s2, kappa)
        deviation = gaussian_log_prob(x_next, other, std) - gaussian_log_prob(x_next, mean, std)
        spread = q * relative / math.sqrt(LATENTS)
        assert deviation.mean().item() == pytest.approx(-((q * relative) ** 2) / 2, abs=4 * spread / math.sqrt(samples))
        assert deviation.std().item() == pytest.approx(spread, rel=0.5)
        # a clip range of 1e-4 is above this noise at the early steps and drowns in it at the last
        worst = deviation.abs().quantile(0.99).item()
        assert worst < 1e-4 / 2 or k >= 5
        assert worst > 1e-4 or k < 8
