"""Marginals of the kernels on Gaussian data, whose exact velocity is known in closed form."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from schedules import along, levels, sd3_sigmas, steps, velocity

from gerl.engine.transitions import KERNELS, coefficients, transition_mean


def affine(s: float, s2: float, kappa: float, c: float) -> float:
    """`rho` with mean' = rho x for the exact velocity of data N(0, c)."""
    kx = (1 - s) * c / ((1 - s) ** 2 * c + s**2)  # E[x0 | x] = kx x
    return (1 - s2) * kx + kappa * (1 - (1 - s) * kx) / s


@given(steps(), levels, st.sampled_from(KERNELS), st.floats(0.1, 3.0), st.floats(-2.0, 2.0))
def test_one_step_from_the_exact_marginal(
    step: tuple[float, float], eta: float, name: str, c: float, m: float
) -> None:  # T13
    s, s2 = step
    kappa, std = coefficients(name, s, s2, eta, 0.97)
    total = (1 - s) ** 2 * c + s**2
    excess = kappa**2 + std**2 - s2**2
    error = affine(s, s2, kappa, c) ** 2 * total + std**2 - ((1 - s2) ** 2 * c + s2**2)
    residual = c * s**2 / total  # Var[x0 | x]
    assert error == pytest.approx(excess - residual * ((1 - s2) - kappa * (1 - s) / s) ** 2, abs=1e-9, rel=1e-6)

    centre = torch.tensor([(1 - s) * m, (1 - s) * m + 1])
    mean = transition_mean(centre, velocity(centre, s, m, c), s, s2, kappa)
    assert mean[0].item() == pytest.approx((1 - s2) * m, abs=1e-5)
    assert (mean[1] - mean[0]).item() == pytest.approx(affine(s, s2, kappa, c), rel=1e-4, abs=1e-4)


def terminal_variance(name: str, eta: float, steps: int, c: float) -> float:
    sigmas, variance = sd3_sigmas(steps), 1.0
    for (s, s2), (kappa, std) in zip(pairwise(sigmas), along(sigmas, name, eta), strict=True):
        variance = affine(s, s2, kappa, c) ** 2 * variance + std**2
    return variance


@pytest.mark.parametrize(
    ("name", "eta", "golden"),
    [
        ("ode", 0.0, [0.6685, 0.8278, 0.9122, 0.9963]),
        ("flow_sde", 0.7, [0.7840, 0.8962, 0.9533, 1.0014]),
        ("flow_sde", 1.2, [0.8602, 0.9258, 0.9623, 0.9984]),
        ("cps", 0.7, [0.5001, 0.5950, 0.6489, 0.7191]),
        ("cps", 0.8, [0.4538, 0.5348, 0.5822, 0.6469]),
        ("precise", 0.7, [0.6239, 0.7916, 0.8892, 0.9952]),
    ],
)
def test_terminal_variance(name: str, eta: float, golden: list[float]) -> None:  # T14
    got = [terminal_variance(name, eta, steps, c=1.0) for steps in (10, 20, 40, 1000)]
    assert got == pytest.approx(golden, abs=6e-5)


@pytest.mark.parametrize(
    ("name", "eta", "golden"),
    [
        ("ode", 0.0, 0.0),
        ("cps", 0.8, 0.0),
        ("precise", 0.7, 0.0),
        ("dance_precise", 0.3, 0.0),
        ("ddim", 0.7, 0.0),
        ("flow_sde", 0.7, 0.00382),
        ("flow_sde", 1.2, 0.18686),
        ("dance_sde", 0.3, 0.64984),
    ],
)
def test_noise_left_when_all_data_is_one_point(name: str, eta: float, golden: float) -> None:  # T15
    assert terminal_variance(name, eta, 10, c=0.0) == pytest.approx(golden, abs=6e-6 if golden else 1e-30)


def terminal_covariance(name: str, eta: float, covariance: torch.Tensor, steps: int) -> torch.Tensor:
    eye, sigmas = torch.eye(2, dtype=torch.float64), sd3_sigmas(steps)
    total = eye.clone()
    for (s, s2), (kappa, std) in zip(pairwise(sigmas), along(sigmas, name, eta), strict=True):
        kx = (1 - s) * covariance @ torch.linalg.inv((1 - s) ** 2 * covariance + s**2 * eye)
        rho = (1 - s2) * kx + kappa / s * (eye - (1 - s) * kx)
        total = rho @ total @ rho.T + std**2 * eye
    return total


def test_sde_and_ode_end_in_the_same_covariance() -> None:  # T16
    covariance = torch.tensor([[1.0, 0.5], [0.5, 0.8]], dtype=torch.float64)
    ode = terminal_covariance("ode", 0.0, covariance, 1000)
    torch.testing.assert_close(ode, covariance, atol=1e-2, rtol=0)
    for name in ("flow_sde", "precise"):
        torch.testing.assert_close(terminal_covariance(name, 0.7, covariance, 1000), ode, atol=1e-2, rtol=0)


@pytest.mark.parametrize(("name", "eta", "golden"), [("flow_sde", 0.7, 0.7840), ("cps", 0.8, 0.4538)])
def test_sampling_has_the_predicted_variance(name: str, eta: float, golden: float) -> None:  # T16
    generator, sigmas = torch.Generator().manual_seed(4), sd3_sigmas(10)
    x = torch.randn(200_000, 1, generator=generator)
    for (s, s2), (kappa, std) in zip(pairwise(sigmas), along(sigmas, name, eta), strict=True):
        x = transition_mean(x, velocity(x, s, 0.5, 1.0), s, s2, kappa) + std * torch.randn(x.shape, generator=generator)
    assert x.var().item() == pytest.approx(golden, rel=0.02)
    assert x.mean().item() == pytest.approx(0.5, abs=0.02)
