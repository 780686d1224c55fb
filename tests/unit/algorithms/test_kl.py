"""KL and its estimators against torch, closed forms and Monte Carlo; gradients, not only values."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gerl.algorithms.core_algos import gaussian_kl, kl_divergence
from gerl.engine.transitions import coefficients, gaussian_log_prob, transition_mean

# --- the true KL

SHAPES = [(3, 5), (3, 4, 2, 6), (3, 7, 4), (3, 2, 4, 2, 3)]  # flat, (B, C, H, W), (B, L, C), (B, C, F, H, W)


@pytest.mark.parametrize("shape", SHAPES)
def test_kl_equals_that_of_torch_averaged_over_the_sample(shape: tuple[int, ...]) -> None:  # T22
    generator = torch.Generator().manual_seed(4)
    mean, reference = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
    normal = torch.distributions.Normal
    expected = torch.distributions.kl_divergence(normal(mean, 0.3), normal(reference, 0.3)).flatten(1).mean(1)
    got = gaussian_kl(mean, reference, 0.3)
    assert got.shape == (3,) and got.dtype == torch.float32
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gaussian_kl(reference, mean, 0.3), got)


@pytest.mark.parametrize("shape", SHAPES)
def test_gradient_of_the_kl(shape: tuple[int, ...]) -> None:  # T22
    mean = torch.randn(shape, generator=torch.Generator().manual_seed(5)).requires_grad_()
    reference = torch.zeros(shape, requires_grad=True)
    gaussian_kl(mean, reference, 0.3).sum().backward()
    assert reference.grad is None and mean.grad is not None
    torch.testing.assert_close(mean.grad, mean.detach() / 0.3**2 / mean[0].numel())


def test_kl_in_terms_of_the_velocity() -> None:  # T22
    s, s2, generator = 0.7, 0.6, torch.Generator().manual_seed(6)
    kappa, std = coefficients("flow_sde", s, s2, 0.7, 0.97)
    x, v, reference = (torch.randn(2, 9, generator=generator) for _ in range(3))
    v.requires_grad_()
    kl = gaussian_kl(transition_mean(x, v, s, s2, kappa), transition_mean(x, reference, s, s2, kappa), std)
    jacobian = kappa * (1 - s) - (1 - s2) * s
    torch.testing.assert_close(kl, jacobian**2 * ((v - reference) ** 2).mean(1) / (2 * std**2), rtol=1e-4, atol=1e-6)
    (gradient,) = torch.autograd.grad(kl.sum(), v)
    torch.testing.assert_close(gradient, jacobian**2 * (v.detach() - reference) / std**2 / 9, rtol=1e-4, atol=1e-6)
    # the published code divides by g^2 = std^2 / |dt| instead
    published = ((jacobian * (v - reference)) ** 2).mean(1) / (2 * std**2 / (s - s2))
    torch.testing.assert_close(published, (s - s2) * kl, rtol=1e-4, atol=1e-6)


def squared_velocity(output: torch.Tensor, reference: torch.Tensor, std: float) -> torch.Tensor:
    return kl_divergence("velocity", output=output, ref_output=reference, std=std)


@pytest.mark.parametrize("function", [gaussian_kl, gaussian_log_prob, squared_velocity])
def test_half_precision_inputs_are_computed_in_fp32(function: Callable[..., torch.Tensor]) -> None:
    a, b = torch.randn(2, 4096).bfloat16(), torch.randn(2, 4096).bfloat16()
    assert torch.equal(function(a, b, 0.3), function(a.float(), b.float(), 0.3))


# --- the other kinds


def test_the_published_scale_is_the_length_of_the_step_times_the_true_kl() -> None:  # T22
    generator, std, dt = torch.Generator().manual_seed(7), 0.3, -0.08
    mean, reference = (torch.randn(3, 4, 2, generator=generator) for _ in range(2))
    true = kl_divergence("gaussian", mean=mean, ref_mean=reference, std=std)
    assert torch.equal(true, gaussian_kl(mean, reference, std))
    published = kl_divergence("flow_grpo", mean=mean, ref_mean=reference, std=std, dt=dt)
    torch.testing.assert_close(published, 0.08 * true)
    g = std / math.sqrt(-dt)
    torch.testing.assert_close(published, ((mean - reference) ** 2).flatten(1).mean(1) / (2 * g**2))
    mean.requires_grad_()
    (gradient,) = torch.autograd.grad(
        kl_divergence("flow_grpo", mean=mean, ref_mean=reference, std=std, dt=dt).sum(), mean
    )
    torch.testing.assert_close(gradient, 0.08 * (mean.detach() - reference) / std**2 / 8)


@pytest.mark.parametrize(("s", "s2"), [(0.95, 0.9), (0.7, 0.6), (0.3, 0.01)])
def test_the_true_kl_of_flow_sde_is_a_multiple_of_the_squared_velocity(s: float, s2: float) -> None:  # T22
    eta, h, generator = 0.7, s - s2, torch.Generator().manual_seed(8)
    kappa, std = coefficients("flow_sde", s, s2, eta, 0.97)
    x, v, reference = (torch.randn(2, 9, generator=generator) for _ in range(3))
    means = transition_mean(x, v, s, s2, kappa), transition_mean(x, reference, s, s2, kappa)
    squared = kl_divergence("velocity", output=v, ref_output=reference)
    g = eta * math.sqrt(s / (1 - s))
    factor = h / 2 * (g * (1 - s) / (2 * s) + 1 / g) ** 2
    true = kl_divergence("gaussian", mean=means[0], ref_mean=means[1], std=std)
    torch.testing.assert_close(true, factor * squared, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_squared_velocity_and_its_gradient(shape: tuple[int, ...]) -> None:
    output = torch.randn(shape, generator=torch.Generator().manual_seed(9)).requires_grad_()
    reference = torch.ones(shape, requires_grad=True)
    got = kl_divergence("velocity", output=output, ref_output=reference)
    expected = [sum((v - 1) ** 2 for v in row) / len(row) for row in output.detach().flatten(1).tolist()]
    assert got.tolist() == pytest.approx(expected, rel=1e-5)
    got.sum().backward()
    assert reference.grad is None and output.grad is not None
    torch.testing.assert_close(output.grad, 2 * (output.detach() - 1) / output[0].numel())


# --- estimators from sampled log-probs


def sampled(kind: str, log_prob: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    return kl_divergence(kind, log_prob=log_prob, ref_log_prob=reference)  # type: ignore[arg-type]


@given(st.floats(-15, 15), st.floats(-5, 5))
def test_sampled_estimators_and_their_gradients(difference: float, reference: float) -> None:
    ref_log_prob = torch.tensor([reference], dtype=torch.float64, requires_grad=True)
    log_prob = (ref_log_prob.detach() + difference).requires_grad_()
    d = log_prob.item() - reference
    closed = {"k1": (d, 1.0), "k2": (d * d / 2, d), "k3": (math.exp(-d) - 1 + d, 1 - math.exp(-d))}
    for kind, (value, slope) in closed.items():
        got = sampled(kind, log_prob, ref_log_prob)
        (gradient,) = torch.autograd.grad(got.sum(), log_prob)
        assert got.item() == pytest.approx(value, rel=1e-9, abs=1e-9)
        assert gradient.item() == pytest.approx(slope, rel=1e-9, abs=1e-9)
        assert ref_log_prob.grad is None and (kind == "k1" or got.item() >= -1e-12)


def test_k3_keeps_its_digits_at_the_small_differences_of_an_update() -> None:
    difference = torch.tensor([1e-4, -3e-4])
    got = sampled("k3", difference, torch.zeros(2))
    assert got.tolist() == pytest.approx([d * d / 2 for d in difference.tolist()], rel=1e-3)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_no_gradient_reaches_the_reference_and_none_is_infinite(kind: str) -> None:
    log_prob = torch.tensor([-1000.0, 0.0, 1000.0], requires_grad=True)
    reference = torch.zeros(3, requires_grad=True)
    estimate = sampled(kind, log_prob, reference)
    estimate.sum().backward()
    assert reference.grad is None and log_prob.grad is not None
    assert torch.isfinite(estimate).all() and torch.isfinite(log_prob.grad).all()
    assert log_prob.grad[1] == (1.0 if kind == "k1" else 0.0)


def test_sampled_estimators_have_the_expectations_of_log_probs_that_are_means_over_dimensions() -> None:
    size, std, shift = 8, 0.5, 0.4
    generator = torch.Generator().manual_seed(10)
    mean = torch.zeros(200_000, size)
    x_next = mean + std * torch.randn(mean.shape, generator=generator)
    log_probs = gaussian_log_prob(x_next, mean, std), gaussian_log_prob(x_next, mean - shift, std)
    k = size * shift**2 / (2 * std**2)  # the KL, summed over the dimensions
    assert gaussian_kl(mean[:1], mean[:1] - shift, std).item() == pytest.approx(k / size)
    assert sampled("k1", *log_probs).mean().item() == pytest.approx(k / size, rel=0.01)
    assert sampled("k2", *log_probs).mean().item() == pytest.approx((k**2 + 2 * k) / (2 * size**2), rel=0.01)
    k3 = math.exp(-(k / size) * (1 - 1 / size)) - 1 + k / size
    assert sampled("k3", *log_probs).mean().item() == pytest.approx(k3, rel=0.01)


def test_on_policy_the_gradient_of_k1_vanishes_on_average_and_that_of_k2_is_the_kls_over_the_dimensions() -> None:
    size, std, samples = 4, 0.5, 400_000
    generator = torch.Generator().manual_seed(11)
    reference = torch.tensor([0.1, -0.2, 0.0, 0.3])
    mean = torch.zeros(1, size, requires_grad=True)
    x_next = std * torch.randn(samples, size, generator=generator)
    log_prob = gaussian_log_prob(x_next, mean.expand(samples, size), std)
    ref_log_prob = gaussian_log_prob(x_next, reference.expand(samples, size), std)
    (true,) = torch.autograd.grad(gaussian_kl(mean, reference[None], std).sum(), mean)
    estimates = [sampled(kind, log_prob, ref_log_prob).mean() for kind in ("k1", "k2")]
    k1, k2 = (torch.autograd.grad(estimate, mean, retain_graph=True)[0] for estimate in estimates)
    noise = 5 / (std * size * math.sqrt(samples))  # five standard errors of the score's mean
    torch.testing.assert_close(k1, torch.zeros(1, size), atol=noise, rtol=0)
    torch.testing.assert_close(k2, true / size, atol=noise / 2, rtol=0)
    assert (true / size).abs().max() > 10 * noise


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (
            "gaussian",
            {"mean": torch.zeros(1, 2), "ref_mean": torch.zeros(1, 2)},
            "gaussian is missing one of its arguments",
        ),
        ("flow_grpo", {"mean": torch.zeros(1, 2), "ref_mean": torch.zeros(1, 2), "std": 0.1}, "flow_grpo is missing"),
        ("velocity", {"output": torch.zeros(1, 2)}, "velocity is missing"),
        ("k3", {"log_prob": torch.zeros(1)}, "k3 is missing"),
        ("k4", {}, "gaussian, flow_grpo, velocity, k1, k2, k3, got 'k4'"),
    ],
)
def test_a_kl_without_its_arguments_is_refused(kind: str, arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kl_divergence(kind, **arguments)  # type: ignore[arg-type]
