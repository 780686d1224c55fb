"""Policy losses, log-ratios, weights of timesteps: naive twins, closed forms; gradients and not only values."""

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from gerl.algorithms.core_algos import (
    clipped_policy_loss,
    gaussian_kl,
    guard_log_ratio,
    masked_policy_loss,
    step_weights,
)
from gerl.engine.transitions import coefficients, gaussian_log_prob, transition_mean

SD3_10 = [1, 0.960129, 0.913349, 0.857692, 0.790368, 0.707278, 0.602151, 0.464876, 0.278049, 0.008929, 0]
TRAINED = list(pairwise(SD3_10))[:9]
Loss = Callable[..., tuple[torch.Tensor, dict[str, float]]]


def loss_and_gradient(
    loss: Loss, ratios: list[float], advantages: list[float], *bounds: list[float] | float
) -> tuple[float, list[float], dict[str, float]]:
    """Mean loss, its gradient by the log-probabilities, metrics. `bounds`: a loss's further arguments."""
    old = torch.linspace(-1, 1, len(ratios), dtype=torch.float64)
    log_prob = (old + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_()
    further = [torch.tensor(bound) if isinstance(bound, list) else bound for bound in bounds]
    losses, metrics = loss(log_prob, old, torch.tensor(advantages, dtype=torch.float64), *further)
    assert losses.shape == (len(ratios),)
    (gradient,) = torch.autograd.grad(losses.mean(), log_prob)
    return losses.mean().item(), gradient.tolist(), metrics


# --- clipped, or masked by the KL


@pytest.mark.parametrize(
    ("loss", "bounds"),
    [
        (clipped_policy_loss, (1e-5, 1e-5)),
        (clipped_policy_loss, (0.2, 0.2)),
        (masked_policy_loss, (torch.zeros(8), 0.0)),
    ],
)
def test_on_policy_the_gradient_is_that_of_reinforce(
    loss: Loss, bounds: tuple[object, float]
) -> None:  # T17, with the tie at ratio 1
    log_prob = torch.randn(8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    advantages = torch.linspace(-2, 1, 8)
    losses, metrics = loss(log_prob, log_prob.detach().clone(), advantages, *bounds)
    losses.mean().backward()
    assert losses.tolist() == (-advantages).tolist()  # with the tie at ratio 1
    assert log_prob.grad is not None
    torch.testing.assert_close(log_prob.grad, -advantages / 8, rtol=0, atol=0)
    assert metrics == {"ratio_deviation": 0, "clip_fraction_low": 0, "clip_fraction_high": 0, "log_ratio_mean": 0}


@pytest.mark.parametrize(
    ("ratio", "advantage", "gradient"),
    [
        (1.3, 1.0, 0.0),  # above the upper bound and still pulled up: removed
        (1.3, -1.0, 1.3),  # above it, pushed back down: kept
        (0.8, -1.0, 0.0),
        (0.8, 1.0, -0.8),
        (1.1, 1.0, -1.1),
        (0.95, -1.0, 0.95),
        (1.3, 0.0, 0.0),
    ],
)
def test_which_gradients_the_bounds_remove(ratio: float, advantage: float, gradient: float) -> None:  # T18
    assert loss_and_gradient(clipped_policy_loss, [ratio], [advantage], 0.1, 0.2)[1] == pytest.approx([gradient])


@pytest.mark.parametrize(
    ("ratio", "advantage", "kl", "gradient"),
    [
        (1.3, 1.0, 0.5, 0.0),  # beyond the threshold and pulled further away: removed
        (1.3, 1.0, 0.4, -1.3),  # within it: kept, however large the ratio
        (1.3, -1.0, 0.9, 1.3),  # beyond it, pulled back: kept
        (0.7, -1.0, 0.9, 0.0),
        (0.7, -1.0, 0.1, 0.7),
        (0.7, 1.0, 0.9, -0.7),
        (1.0, 1.0, 0.9, -1.0),
        (1.3, 0.0, 0.9, 0.0),
    ],
)
def test_which_gradients_the_kl_removes(ratio: float, advantage: float, kl: float, gradient: float) -> None:
    assert loss_and_gradient(masked_policy_loss, [ratio], [advantage], [kl], 0.5)[1] == pytest.approx([gradient])


def test_metrics_of_known_ratios() -> None:
    ratios, advantages = [1.0, 1.3, 1.3, 0.7, 0.7, 1.15, 0.95, 2.0], [1.0, 1.0, -1.0, -1.0, 1.0, 1.0, -1.0, 3.0]
    kl = [0.6, 0.4, 0.6, 0.6, 0.6, 0.4, 0.6, 0.7]
    common = {"ratio_deviation": 1.0, "log_ratio_mean": sum(math.log(r) for r in ratios) / 8}
    _, _, clipped = loss_and_gradient(clipped_policy_loss, ratios, advantages, 0.1, 0.2)
    _, _, masked = loss_and_gradient(masked_policy_loss, ratios, advantages, kl, 0.5)
    assert clipped == pytest.approx(common | {"clip_fraction_low": 1 / 8, "clip_fraction_high": 2 / 8}, rel=1e-5)
    assert masked == pytest.approx(common | {"clip_fraction_low": 2 / 8, "clip_fraction_high": 1 / 8}, rel=1e-5)


@given(
    st.lists(st.tuples(st.floats(0.2, 3.0), st.floats(-3, 3)), min_size=1, max_size=6),
    st.floats(0.01, 0.5),
    st.floats(0.01, 0.8),
)
def test_clipped_loss_equals_its_naive_twin(pairs: list[tuple[float, float]], low: float, high: float) -> None:  # T18
    ratios, advantages = [r for r, _ in pairs], [a for _, a in pairs]
    assume(all(abs(r - bound) > 1e-9 for r in ratios for bound in (1 - low, 1 + high)))  # there rounding decides
    loss, gradient, _ = loss_and_gradient(clipped_policy_loss, ratios, advantages, low, high)
    values = [max(-a * r, -a * min(max(r, 1 - low), 1 + high)) for r, a in pairs]
    assert loss == pytest.approx(sum(values) / len(pairs), abs=1e-12)
    for (r, a), got in zip(pairs, gradient, strict=True):
        removed = (a > 0 and r > 1 + high) or (a < 0 and r < 1 - low)
        assert got == pytest.approx(0.0 if removed else -a * r / len(pairs), abs=1e-12)


def test_the_bounds_are_asymmetric() -> None:
    assert loss_and_gradient(clipped_policy_loss, [1.25], [1.0], 0.1, 0.3)[1] == pytest.approx([-1.25])
    assert loss_and_gradient(clipped_policy_loss, [1.25], [1.0], 0.3, 0.1)[1] == [0.0]


def test_no_gradient_reaches_the_old_policy_and_nothing_is_written() -> None:
    log_prob, old = torch.tensor([0.1, 0.4], requires_grad=True), torch.tensor([0.2, 0.1], requires_grad=True)
    advantages = torch.tensor([1.0, -1.0])
    clipped_policy_loss(log_prob, old, advantages, 0.2, 0.2)[0].mean().backward()
    assert old.grad is None and log_prob.grad is not None
    assert advantages.tolist() == [1.0, -1.0] and old.tolist() == pytest.approx([0.2, 0.1])


def test_log_ratio_and_ratio_after_a_shift_of_the_mean() -> None:  # T19
    size, std, delta = 16, 0.5, 0.4
    z = torch.randn(100_000, size, generator=torch.Generator().manual_seed(1))
    old, new = torch.zeros_like(z), torch.full_like(z, delta)
    log_ratio = gaussian_log_prob(std * z, new, std) - gaussian_log_prob(std * z, old, std)
    assert log_ratio.mean().item() == pytest.approx(-(delta**2) / (2 * std**2), rel=0.02)
    assert log_ratio.var().item() == pytest.approx(delta**2 / (std**2 * size), rel=0.03)
    k = size * delta**2 / (2 * std**2)
    assert log_ratio.exp().mean().item() == pytest.approx(math.exp(-k / size * (1 - 1 / size)), rel=0.01)
    near = 0.02  # of the summed log-prob the mean ratio is 1, visible without rare huge ratios only for a small shift
    summed = size * (gaussian_log_prob(std * z, near + old, std) - gaussian_log_prob(std * z, old, std))
    assert summed.exp().mean().item() == pytest.approx(1.0, abs=5e-3)


def test_log_ratio_without_its_kl_is_linear_in_the_shift() -> None:  # T20
    generator, std = torch.Generator().manual_seed(2), 0.3
    old = torch.randn(5, 4, 3, 3, generator=generator)
    shift, z = (0.1 * torch.randn(old.shape, generator=generator) for _ in range(2))
    x_next = old + std * z
    log_ratio = gaussian_log_prob(x_next, old + shift, std) - gaussian_log_prob(x_next, old, std)
    centred = std * (log_ratio + gaussian_kl(old + shift, old, std))
    torch.testing.assert_close(centred, (z * shift).flatten(1).mean(1), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("trained", "golden"), [(range(9), -1.1209), ((1, 2, 3), -0.1775), ((4,), -0.1125)])
def test_policy_gradient_of_a_linear_gaussian_chain(trained: range | tuple[int, ...], golden: float) -> None:  # T21
    """Reward x_T, velocity v* + theta with v* exact for data N(0, 1), noise at the trained steps: dE[x_T]/dtheta."""
    theta, samples, generator = torch.zeros((), requires_grad=True), 200_000, torch.Generator().manual_seed(3)
    x, log_probs, slopes = torch.randn(samples, 1, generator=generator), [], []
    for k, (s, s2) in enumerate(pairwise(SD3_10)):
        kappa, std = coefficients("flow_sde", s, s2, 0.7 if k in trained else 0.0, SD3_10[1])
        slope = (2 * s - 1) / ((1 - s) ** 2 + s**2)
        mean = transition_mean(x, slope * x + theta, s, s2, kappa)
        x_next = (mean + std * torch.randn(x.shape, generator=generator)).detach()
        if k in trained:
            log_probs.append(gaussian_log_prob(x_next, mean, std))
        slopes.append((1 + kappa - s2 + slope * ((s2 - s) + (kappa - s2) * (1 - s)), kappa * (1 - s) - (1 - s2) * s))
        x = x_next
    exact = sum(slopes[k][1] * math.prod(rho for rho, _ in slopes[k + 1 :]) for k in trained)
    assert exact == pytest.approx(golden, abs=6e-5)
    losses = [clipped_policy_loss(p, p.detach(), x[:, 0], 1e-4, 1e-4)[0] for p in log_probs]
    torch.stack(losses).mean(1).sum().backward()
    assert theta.grad is not None
    assert -theta.grad.item() == pytest.approx(golden, abs=0.03)


ratios_on_either_side = st.one_of(st.just(1.0), st.floats(0.2, 0.99), st.floats(1.01, 3.0))
divergences = st.floats(0, 1, width=16)


@given(st.lists(st.tuples(ratios_on_either_side, st.floats(-3, 3), divergences), min_size=1, max_size=6), divergences)
def test_masked_loss_equals_its_naive_twin(rows: list[tuple[float, float, float]], threshold: float) -> None:
    loss, gradient, metrics = loss_and_gradient(
        masked_policy_loss, *([row[i] for row in rows] for i in range(3)), threshold
    )
    high = [a > 0 and r > 1 and kl >= threshold for r, a, kl in rows]
    low = [a < 0 and r < 1 and kl >= threshold for r, a, kl in rows]
    expected = [0.0 if h or w else -a * r / len(rows) for (r, a, _), h, w in zip(rows, high, low, strict=True)]
    assert loss == pytest.approx(-sum(r * a for r, a, _ in rows) / len(rows), abs=1e-12)
    assert gradient == pytest.approx(expected, abs=1e-12)
    assert metrics["clip_fraction_high"] == pytest.approx(sum(high) / len(rows))
    assert metrics["clip_fraction_low"] == pytest.approx(sum(low) / len(rows))


def test_the_masked_loss_trains_neither_the_old_policy_nor_the_kl_and_survives_any_ratio() -> None:
    log_prob = torch.tensor([0.1, 1000.0, -1000.0], requires_grad=True)
    old, kl = torch.zeros(3, requires_grad=True), torch.ones(3, requires_grad=True)
    masked_policy_loss(log_prob, old, torch.tensor([-1.0, 1.0, -1.0]), kl, 0.5)[0].mean().backward()
    assert old.grad is None and kl.grad is None and log_prob.grad is not None
    assert log_prob.grad.tolist() == pytest.approx([math.exp(0.1) / 3, 0.0, 0.0])


# --- GRPO-Guard


def guarded(shape: tuple[int, ...], std: float) -> tuple[torch.Tensor, ...]:
    """z, the old mean, a trained mean with gradient near it, and Guard's log-ratio at x' = old mean + std z."""
    generator = torch.Generator().manual_seed(7)
    z, old, shift = (torch.randn(shape, generator=generator) for _ in range(3))
    mean = (old + 0.1 * shift).requires_grad_()
    x_next = old + std * z
    log_prob, old_log_prob = gaussian_log_prob(x_next, mean, std), gaussian_log_prob(x_next, old, std)
    return z, old, mean, guard_log_ratio(log_prob, old_log_prob, mean, old, std)


@pytest.mark.parametrize("shape", [(3, 5), (3, 4, 2, 6), (3, 7, 4)])
@pytest.mark.parametrize("std", [0.06, 0.3, 0.7])
def test_guard_log_ratio_is_linear_in_the_shift_of_the_mean(shape: tuple[int, ...], std: float) -> None:  # T20
    z, old, mean, log_ratio = guarded(shape, std)
    assert log_ratio.shape == (3,)
    torch.testing.assert_close(log_ratio, (z * (mean - old)).flatten(1).mean(1), atol=1e-5, rtol=1e-4)
    (gradient,) = torch.autograd.grad(log_ratio.sum(), mean)
    torch.testing.assert_close(gradient, z / z[0].numel(), atol=1e-5, rtol=1e-4)


def test_guard_log_ratio_on_policy_is_zero_with_the_gradient_of_the_log_prob_times_std() -> None:
    generator, std = torch.Generator().manual_seed(8), 0.3
    old, z = (torch.randn(2, 6, generator=generator) for _ in range(2))
    mean = old.clone().requires_grad_()
    log_prob = gaussian_log_prob(old + std * z, mean, std)
    log_ratio = guard_log_ratio(log_prob, log_prob.detach(), mean, old, std)
    assert log_ratio.tolist() == [0.0, 0.0]
    (got,) = torch.autograd.grad(log_ratio.sum(), mean, retain_graph=True)
    (plain,) = torch.autograd.grad(log_prob.sum(), mean)
    torch.testing.assert_close(got, std * plain)


def test_guard_log_ratio_trains_the_new_policy_only() -> None:
    new, old, old_mean = (torch.randn(2, requires_grad=True) for _ in range(3))
    mean = torch.randn(2, 3, requires_grad=True)
    guard_log_ratio(new, old, mean, old_mean[:, None].expand(2, 3), 0.5).sum().backward()
    assert old.grad is None and old_mean.grad is None
    assert new.grad is not None and new.grad.tolist() == [0.5, 0.5] and mean.grad is not None


@pytest.mark.parametrize("step", [0, 4, 8])
def test_guard_log_ratio_is_centred_and_spreads_alike_at_every_timestep(step: int) -> None:  # T20
    size, shift, samples = 16, 0.05, 100_000
    _, std = coefficients("flow_sde", *TRAINED[step], 0.7, SD3_10[1])
    old = torch.zeros(samples, size)
    x_next = std * torch.randn(old.shape, generator=torch.Generator().manual_seed(9))
    log_probs = gaussian_log_prob(x_next, old + shift, std), gaussian_log_prob(x_next, old, std)
    log_ratio = guard_log_ratio(*log_probs, old + shift, old, std)
    error = shift / math.sqrt(size * samples)
    assert log_ratio.mean().item() == pytest.approx(0, abs=4 * error)
    assert log_ratio.std().item() == pytest.approx(shift / math.sqrt(size), rel=0.02)
    plain = std * (log_probs[0] - log_probs[1])
    assert plain.mean().item() == pytest.approx(-(shift**2) / (2 * std), abs=4 * error)
    assert -plain.mean().item() > 10 * error


# --- weights of timesteps


def sd3_steps(kernel: str = "flow_sde", noise_level: float = 0.7) -> tuple[list[float], list[float], list[float]]:
    coefficient = [coefficients(kernel, s, s2, noise_level, SD3_10[1]) for s, s2 in TRAINED]
    jacobians = [kappa * (1 - s) - (1 - s2) * s for (s, s2), (kappa, _) in zip(TRAINED, coefficient, strict=True)]
    return [std for _, std in coefficient], [s2 - s for s, s2 in TRAINED], jacobians


def test_weights_by_std_have_mean_one_and_are_those_published_for_sd3() -> None:
    stds, dts, jacobians = sd3_steps()
    weights = step_weights("std", stds, dts, jacobians)
    assert sum(weights) / 9 == pytest.approx(1)
    assert weights == pytest.approx([2.252 * std for std in stds], rel=1e-3)
    assert step_weights("std", [0.2, 0.6], [1.0, 1.0], [1.0, 1.0]) == pytest.approx([0.5, 1.5])


def test_the_other_weights_are_one_or_inverse() -> None:
    stds, dts, jacobians = [0.1, 0.2, 0.4], [-0.5, -0.25, -0.1], [-0.5, 0.2, -2.0]
    assert step_weights("uniform", stds, dts, jacobians) == [1.0, 1.0, 1.0]
    assert step_weights("inverse_dt", stds, dts, jacobians) == pytest.approx([2, 4, 10])
    assert step_weights("inverse_jacobian", stds, dts, jacobians) == pytest.approx([2, 5, 0.5])


def test_weights_over_the_jacobian_count_by_the_interval_or_by_the_noise() -> None:
    stds, dts, jacobians = sd3_steps()
    for kind, expected in (("pcpo", [abs(dt) for dt in dts]), ("std2_over_jacobian", stds)):
        weights = step_weights(kind, stds, dts, jacobians)  # type: ignore[arg-type]
        assert sum(weights) / 9 == pytest.approx(1)
        share = [w * abs(j) / s for w, j, s in zip(weights, jacobians, stds, strict=True)]
        assert [v / share[0] for v in share] == pytest.approx([v / expected[0] for v in expected])


@pytest.mark.parametrize("kernel", ["flow_sde", "cps", "precise"])
def test_inverse_jacobians_level_the_gradients_of_guard_over_the_timesteps(kernel: str) -> None:
    weights = step_weights("inverse_jacobian", *sd3_steps(kernel, 0.7))
    generator = torch.Generator().manual_seed(10)
    x, start, z = (torch.randn(2, 8, generator=generator) for _ in range(3))
    for (s, s2), weight in zip(TRAINED, weights, strict=True):
        kappa, std = coefficients(kernel, s, s2, 0.7, SD3_10[1])
        velocity = start.clone().requires_grad_()
        mean = transition_mean(x, velocity, s, s2, kappa)
        old = mean.detach()
        log_prob = gaussian_log_prob(old + std * z, mean, std)
        log_ratio = guard_log_ratio(log_prob, log_prob.detach(), mean, old, std)
        (gradient,) = torch.autograd.grad(weight * log_ratio.sum(), velocity)
        torch.testing.assert_close(gradient.abs(), z.abs() / 8, rtol=1e-3, atol=1e-4)


def test_weights_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match=r"inverse_dt .*timestep 1 "):
        step_weights("inverse_dt", [0.1, 0.1], [-0.1, 0.0], [1.0, 1.0])
    with pytest.raises(ValueError, match=r"uniform, std, inverse_dt, .*, got 'dt'"):
        step_weights("dt", [0.1], [-0.1], [1.0])  # type: ignore[arg-type]
    assert step_weights("std", [], [], []) == []
