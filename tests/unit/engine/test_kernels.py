"""The kernel table against published closed forms and golden numbers.

Notation: `s` sigma, `s2` next sigma, `h = s - s2`. Golden numbers were computed independently in a study of the
published implementations, on the 10-step schedule of Stable Diffusion 3.
"""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler
from hypothesis import given
from hypothesis import strategies as st
from schedules import along, levels, sd3_sigmas, steps

from gerl.engine.transitions import (
    KERNELS,
    DDIMRule,
    FlowRule,
    Transitions,
    coefficients,
    gaussian_log_prob,
    transition_mean,
)

STOCHASTIC = tuple(name for name in KERNELS if name != "ode")
SD3_10 = [1, 0.960129, 0.913349, 0.857692, 0.790368, 0.707278, 0.602151, 0.464876, 0.278049, 0.008929, 0]

# --- schedules


def test_sigmas_of_sd3_are_shifted_twice_at_the_end() -> None:  # T1
    assert sd3_sigmas(10) == pytest.approx(SD3_10, abs=5e-7)


@pytest.mark.parametrize(
    ("config", "mu", "golden"),
    [
        ({"shift": 3.0}, None, [1, 0.9643, 0.9231, 0.875, 0.8182, 0.75, 0.6667, 0.5625, 0.4286, 0.25, 0]),
        ({"use_dynamic_shifting": True}, 0.63, [1, 0.9037, 0.7897, 0.6525, 0.4842, 0.273, 0]),  # Flux at 512 pixels
    ],
)
def test_sigmas_given_by_the_caller(config: dict[str, Any], mu: float | None, golden: list[float]) -> None:  # T1
    n, scheduler = len(golden) - 1, FlowMatchEulerDiscreteScheduler(**config)
    scheduler.set_timesteps(sigmas=[1 - k / n for k in range(n)], mu=mu)
    assert scheduler.sigmas.tolist() == pytest.approx(golden, abs=5e-5)


# --- coefficients


@given(steps(), st.sampled_from(KERNELS))
def test_without_noise_every_kernel_is_the_euler_step(step: tuple[float, float], name: str) -> None:  # T3
    s, s2 = step
    assert coefficients(name, s, s2, 0.0, 0.99) == (s2, 0.0)


@pytest.mark.parametrize("name", KERNELS)
def test_a_step_of_length_zero_has_no_noise(name: str) -> None:
    assert coefficients(name, 0.5, 0.5, 0.7, 0.9) == (0.5, 0.0)


@given(steps(), st.floats(0.05, 1.5))
def test_flow_sde_equals_its_literal_form_and_its_score_form(step: tuple[float, float], eta: float) -> None:  # T4
    s, s2 = step
    x, v, dt = 0.7, -1.3, s2 - s
    kappa, std = coefficients("flow_sde", s, s2, eta, 0.97)
    mean = (1 - s2) * (x - s * v) + kappa * (x + (1 - s) * v)
    g = eta * math.sqrt(s / (1 - s))
    literal = x * (1 + g**2 / (2 * s) * dt) + v * (1 + g**2 * (1 - s) / (2 * s)) * dt
    score = -(x + (1 - s) * v) / s
    assert mean == pytest.approx(literal, abs=1e-9)
    assert mean == pytest.approx(x + dt * (v - 0.5 * g**2 * score), abs=1e-9)
    assert std == pytest.approx(g * math.sqrt(-dt), abs=1e-12)


@given(steps(), levels)
def test_dance_is_flow_with_a_constant_diffusion(step: tuple[float, float], eta: float) -> None:  # T5
    s, s2 = step
    flow = coefficients("flow_sde", s, s2, eta * math.sqrt((1 - s) / s), 0.97)
    assert coefficients("dance_sde", s, s2, eta, 0.97) == pytest.approx(flow, abs=1e-9)


@given(steps())
def test_special_noise_levels(step: tuple[float, float]) -> None:  # T5
    s, s2 = step
    assert coefficients("cps", s, s2, 1.0, 0.97) == (0.0, s2)
    assert coefficients("ddim", s, s2, 1.0, 0.97) == pytest.approx(
        coefficients("precise", s, s2, math.sqrt(2), 0.97), abs=1e-9
    )
    assert coefficients("precise", 1.0, s2, 0.7, 0.97) == (0.0, s2)


@given(steps())
def test_ddim_at_one_is_ddpm_ancestral_sampling(step: tuple[float, float]) -> None:  # T5
    s, s2 = step
    kappa, std = coefficients("ddim", s, s2, 1.0, 0.97)
    # with y = x / (1 - sigma) and k = sigma / (1 - sigma) the posterior q(y' | y, y0) has variance k'^2 (1 - k'^2/k^2)
    k, k2 = s / (1 - s), s2 / (1 - s2)
    assert std == pytest.approx((1 - s2) * k2 * math.sqrt(1 - k2**2 / k**2), rel=1e-9)
    assert kappa == pytest.approx((1 - s2) * k2**2 / k, rel=1e-6)


@given(steps(), levels, st.sampled_from(STOCHASTIC))
def test_excess_variance_is_that_of_euler_maruyama_and_of_no_other(
    step: tuple[float, float], eta: float, name: str
) -> None:  # T6
    s, s2 = step
    kappa, std = coefficients(name, s, s2, eta, 0.97)
    h, g2 = s - s2, {"flow_sde": eta**2 * s / (1 - s), "dance_sde": eta**2}.get(name, 0.0)
    excess = g2 * h**2 / s * (1 + g2 / (4 * s))
    assert kappa**2 + std**2 - s2**2 == pytest.approx(excess, rel=1e-9, abs=1e-9 if excess else 1e-12)


def euler_maruyama(name: str, s: float, s2: float, eta: float, substeps: int) -> tuple[float, float]:
    """Exact mean and variance of Euler-Maruyama for `dx = (v + g^2/(2s) eps_h) ds + g dW` at a constant x0h.

    For `y = x - (1 - s) x0h = s eps_h` it reads `dy = y/s (1 + g^2/(2s)) ds + g dW`; returns `(kappa, std)`.
    """
    factor, variance, ds = 1.0, 0.0, (s2 - s) / substeps
    for k in range(substeps):
        t = s + k * ds
        g2 = eta**2 * (t / (1 - t) if name == "precise" else 1.0)
        a = 1 + ds * (1 + g2 / (2 * t)) / t
        factor, variance = factor * a, variance * a * a + g2 * -ds
    return factor * s, math.sqrt(variance)


@pytest.mark.parametrize("name", ["precise", "dance_precise"])
@pytest.mark.parametrize(("s", "s2"), [(0.95, 0.8), (0.7, 0.5), (0.5, 0.2)])
@pytest.mark.parametrize("eta", [0.3, 0.7, 1.0])
def test_precise_solves_the_sde_of_a_constant_prediction(name: str, s: float, s2: float, eta: float) -> None:  # T7
    exact = coefficients(name, s, s2, eta, 0.97)
    assert euler_maruyama(name, s, s2, eta, 400) == pytest.approx(exact, rel=1e-2)
    assert euler_maruyama(name, s, s2, eta, 12800) == pytest.approx(exact, rel=4e-4)


@pytest.mark.parametrize(
    ("name", "noise_level", "golden"),
    [
        ("flow_sde", 0.7, ".700 .743 .536 .446 .392 .353 .319 .282 .225 .006"),
        ("flow_sde", 1.2, "1.20 1.27 .92"),
        ("dance_sde", 0.3, ".060 .065 .071 .078 .086 .097 .111 .130 .156"),
        ("cps", 0.8, ".913 .869 .816 .752 .673 .573 .442 .264 .0085"),
        ("precise", 0.7, ".960 .527 .420 .358 .313 .273 .227 .159 .0082"),
    ],
)
def test_std_along_the_sd3_schedule(name: str, noise_level: float, golden: str) -> None:  # T9
    stds = [std for _, std in along(sd3_sigmas(10), name, noise_level)]
    for std, expected in zip(stds, golden.split(), strict=False):
        decimals = len(expected.partition(".")[2])
        assert std == pytest.approx(float(expected), abs=0.51 * 10**-decimals)


def naive_coefficients(name: str, s: float, s2: float, eta: float, second: float) -> tuple[float, float]:
    """The table of the study, row by row."""
    h, tilde = s - s2, (second if s == 1 else s)
    r = s2 * (1 - s) / (s * (1 - s2))
    if name == "flow_sde":
        g = eta * math.sqrt(s / (1 - tilde))
        return s2 - g**2 * h / (2 * s), g * math.sqrt(h)
    if name == "dance_sde":
        return s2 - eta**2 * h / (2 * s), eta * math.sqrt(h)
    if name == "cps":
        return s2 * math.cos(eta * math.pi / 2), s2 * math.sin(eta * math.pi / 2)
    if name == "precise":
        return s2 * r ** (eta**2 / 2), s2 * math.sqrt(1 - r ** (eta**2))
    if name == "dance_precise":
        a = eta**2 * (1 / s2 - 1 / s) if s2 else math.inf
        return s2 * math.exp(-a / 2), s2 * math.sqrt(1 - math.exp(-a))
    std = eta * s2 * math.sqrt(1 - r**2)
    return math.sqrt(s2**2 - std**2), std


@pytest.mark.parametrize("name", STOCHASTIC)
@pytest.mark.parametrize("noise_level", [0.3, 0.7, 1.0])
def test_the_whole_table_along_the_sd3_schedule(name: str, noise_level: float) -> None:  # T9
    sigmas = sd3_sigmas(10)
    for (s, s2), got in zip(pairwise(sigmas), along(sigmas, name, noise_level), strict=True):
        assert got == pytest.approx(naive_coefficients(name, s, s2, noise_level, sigmas[1]), abs=1e-9)


@pytest.mark.parametrize("name", ["cps", "precise", "dance_precise", "ddim"])
def test_the_last_step_has_no_density(name: str) -> None:
    assert coefficients(name, 0.1, 0.0, 0.7, 0.97) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("sde", 0.5, 0.4, 0.7, 0.9), "unknown kernel 'sde'.*flow_sde"),
        (("flow_sde", 0.4, 0.5, 0.7, 0.9), "0 <= next <= sigma <= 1.*0.4.*0.5"),
        (("flow_sde", 1.1, 0.5, 0.7, 0.9), "sigma 1.1"),
        (("flow_sde", 0.5, -0.1, 0.7, 0.9), "next -0.1"),
        (("cps", 0.5, 0.4, -0.1, 0.9), "noise_level must be >= 0, got -0.1"),
        (("flow_sde", 1.0, 0.9, 0.7, 1.0), "sigma_one must be below 1"),
        (("ddim", 0.9, 0.5, 1.5, 0.9), "noise_level 1.5"),
    ],
)
def test_wrong_arguments_are_named(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        coefficients(*arguments)


# --- mean and log-probability


def test_without_noise_the_mean_is_bitwise_the_schedulers_step() -> None:  # T3
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(10)
    sigmas = scheduler.sigmas.tolist()
    x = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    for k, t in enumerate(scheduler.timesteps):
        v = torch.randn(x.shape, generator=torch.Generator().manual_seed(k))
        expected = scheduler.step(v, t, x, return_dict=False)[0]
        kappa, _ = coefficients("flow_sde", sigmas[k], sigmas[k + 1], 0.0, sigmas[1])
        x = transition_mean(x, v, sigmas[k], sigmas[k + 1], kappa)
        assert torch.equal(x, expected)


@given(steps(), st.floats(-0.5, 1.0))
def test_the_mean_is_the_formula(step: tuple[float, float], kappa: float) -> None:
    s, s2 = step
    x, v = torch.tensor([[0.3, -2.0]]), torch.tensor([[1.1, 0.4]])
    formula = (1 - s2) * (x.double() - s * v.double()) + kappa * (x.double() + (1 - s) * v.double())
    torch.testing.assert_close(transition_mean(x, v, s, s2, kappa).double(), formula, atol=1e-6, rtol=1e-5)


def test_the_mean_is_fp32_and_writes_nothing() -> None:
    x, v = torch.randn(2, 3).bfloat16(), torch.randn(2, 3).half()
    before = x.clone(), v.clone()
    assert transition_mean(x, v, 0.6, 0.4, 0.3).dtype == torch.float32
    assert torch.equal(x, before[0]) and torch.equal(v, before[1])


@pytest.mark.parametrize("shape", [(3,), (3, 5), (3, 4, 2, 2), (3, 7, 6), (2, 3, 2, 2, 2)])
def test_log_prob_is_that_of_torch_averaged_over_the_sample(shape: tuple[int, ...]) -> None:  # T10
    generator = torch.Generator().manual_seed(1)
    mean, x = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
    if len(shape) == 1:
        mean, x = mean[:, None], x[:, None]
    expected = torch.distributions.Normal(mean, 0.3).log_prob(x).flatten(1).mean(1)
    got = gaussian_log_prob(x, mean, 0.3)
    assert got.shape == (shape[0],) and got.dtype == torch.float32
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_on_policy_log_prob_has_its_mean_and_variance() -> None:  # T10
    std, size = 0.4, 64
    z = torch.randn(20_000, size, generator=torch.Generator().manual_seed(2))
    log_prob = gaussian_log_prob(std * z, torch.zeros_like(z), std)
    assert log_prob.mean().item() == pytest.approx(-math.log(std) - 0.5 * math.log(2 * math.pi) - 0.5, abs=4e-3)
    assert log_prob.var().item() == pytest.approx(1 / (2 * size), rel=0.05)


def test_the_unnormalised_log_prob_of_cps_is_scaled_by_the_variance() -> None:  # T10
    x, mean, std = torch.randn(2, 9), torch.randn(2, 9), 0.3
    constant = math.log(std) + 0.5 * math.log(2 * math.pi)
    published = -((x - mean) ** 2).mean(1)
    torch.testing.assert_close(2 * std**2 * (gaussian_log_prob(x, mean, std) + constant), published)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scoring_a_stored_value_again_is_bitwise_the_same(dtype: torch.dtype) -> None:  # T11
    generator = torch.Generator().manual_seed(3)
    x, v, noise = (torch.randn(2, 4, 4, 4, generator=generator) for _ in range(3))
    kappa, std = coefficients("flow_sde", 0.7, 0.6, 0.7, 0.97)
    mean = transition_mean(x, v, 0.7, 0.6, kappa)
    stored = (mean + std * noise).to(dtype)
    again = gaussian_log_prob(stored.clone(), transition_mean(x, v, 0.7, 0.6, kappa), std)
    assert torch.equal(again, gaussian_log_prob(stored, mean, std))


def test_the_gradient_reaches_the_mean_and_not_the_sample() -> None:  # T12
    v = torch.randn(2, 6, requires_grad=True)
    x, s, s2 = torch.randn(2, 6), 0.7, 0.6
    kappa, std = coefficients("flow_sde", s, s2, 0.7, 0.97)
    mean = transition_mean(x, v, s, s2, kappa)
    x_next = mean + std * torch.randn(2, 6)  # reparametrised: undetached, its gradient would cancel the mean's
    gaussian_log_prob(x_next, mean, std).sum().backward()
    z = ((x_next - mean) / std).detach()
    jacobian = kappa * (1 - s) - (1 - s2) * s
    assert v.grad is not None
    torch.testing.assert_close(v.grad, z * jacobian / std / 6, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("std", [0.0, -0.1])
def test_a_deterministic_step_has_no_log_prob(std: float) -> None:
    with pytest.raises(ValueError, match="deterministic"):
        gaussian_log_prob(torch.zeros(1, 2), torch.zeros(1, 2), std)


def test_an_inverted_schedule_predicts_the_negative_velocity() -> None:
    x, v = torch.randn(2, 5), torch.randn(2, 5)
    usual, inverted = FlowRule(0.7, 0.6, 0.5, 0.1), FlowRule(0.7, 0.6, 0.5, 0.1, inverted=True)
    assert torch.equal(usual.mean(x, v), transition_mean(x, v, 0.7, 0.6, 0.5))
    assert torch.equal(inverted.mean(x, -v), usual.mean(x, v))


# --- the forward process


def ddim_rule(prediction_type: str, clip_range: float | None = None, std: float = 0.1) -> DDIMRule:
    s, s2 = 0.6, 0.28
    a, a2 = math.sqrt(1 - s**2), math.sqrt(1 - s2**2)
    return DDIMRule(s, s2, a, a2, math.sqrt(s2**2 - std**2), std, prediction_type, clip_range)


RULES = [FlowRule(0.7, 0.6, 0.5, 0.1), FlowRule(0.7, 0.6, 0.5, 0.1, inverted=True)]
RULES += [ddim_rule(prediction_type) for prediction_type in ("epsilon", "v_prediction", "sample")]


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("shape", [(3, 5), (2, 4, 3, 3)])
def test_clean_inverts_noised_with_the_target(rule: FlowRule | DDIMRule, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(11)
    x0, noise = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
    x, output = rule.noised(x0, noise), rule.target(x0, noise)
    alpha = math.sqrt(1 - rule.sigma**2) if isinstance(rule, DDIMRule) else 1 - rule.sigma
    torch.testing.assert_close(x, alpha * x0 + rule.sigma * noise)
    torch.testing.assert_close(rule.clean(x, output), x0, atol=2e-6, rtol=1e-5)
    assert not torch.allclose(rule.clean(x, output + 0.1), x0, atol=1e-2)
    kept = math.sqrt(1 - rule.sigma_next**2) if isinstance(rule, DDIMRule) else 1 - rule.sigma_next
    left = rule.direction if isinstance(rule, DDIMRule) else rule.kappa
    torch.testing.assert_close(rule.mean(x, output), kept * x0 + left * noise, atol=2e-6, rtol=1e-5)
    half = [v.half() for v in (x0, noise)]
    assert {f(*half).dtype for f in (rule.noised, rule.target, rule.clean)} == {torch.float32}


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_jacobian_is_that_of_the_mean_and_dt_is_negative(rule: FlowRule | DDIMRule) -> None:  # T8
    x, v = torch.ones(1, 4), torch.linspace(-1, 1, 4)[None]
    difference = (rule.mean(x, v + 0.5) - rule.mean(x, v)) / 0.5
    torch.testing.assert_close(difference.abs(), torch.full_like(x, rule.jacobian), atol=2e-6, rtol=1e-5)
    assert rule.dt == rule.sigma_next - rule.sigma < 0


@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction", "sample"])
@pytest.mark.parametrize("clip", [False, True])
def test_without_noise_the_ddim_step_is_bitwise_the_schedulers(prediction_type: str, clip: bool) -> None:
    scheduler = DDIMScheduler(prediction_type=prediction_type, clip_sample=clip, clip_sample_range=0.5)
    scheduler.set_timesteps(5)
    x, output = (torch.randn(2, 4, 3, 3, generator=torch.Generator().manual_seed(i)) for i in (0, 1))
    for t in scheduler.timesteps:
        rule = Transitions("ode", 0.0).next_rule(scheduler, t, None)
        step = scheduler.step(output, t, x)
        assert torch.equal(rule.mean(x, output), step.prev_sample)
        assert torch.equal(rule.clean(x, output), step.pred_original_sample)
        assert (rule.clean(x, output).abs().max() <= 0.5) == clip


def test_other_prediction_types_are_unknown() -> None:
    with pytest.raises(ValueError, match="prediction_type 'flow'"):
        ddim_rule("flow")
