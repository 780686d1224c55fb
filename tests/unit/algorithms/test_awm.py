"""AWM: likelihoods by hand, the on-policy gradient as advantage-weighted flow matching, the clip."""

import math
from collections.abc import Callable
from typing import get_args

import pytest
import torch
import training
from replaying import counted_rows
from training import noised

from gerl.algorithms.awm import AWM, log_likelihood
from gerl.algorithms.core_algos import clipped_policy_loss
from gerl.config import Config, algorithm_config
from gerl.config.blocks import LikelihoodWeighting

SIGMA = 0.6
GENERATOR = torch.Generator().manual_seed(1)
OUTPUT, OLD, TARGET = (torch.randn(6, 3, 2, generator=GENERATOR, dtype=torch.float64) for _ in range(3))
ADVANTAGES = torch.tensor([-2.0, -1.0, 0.0, 0.5, 1.5, 3.0], dtype=torch.float64)
WEIGHTINGS = get_args(LikelihoodWeighting)
SLOPES: dict[str, Callable[[float], float]] = {  # dW / dl at error l
    "uniform": lambda error: 1.0,
    "t": lambda error: SIGMA,
    "t2": lambda error: SIGMA**2,
    "huber": lambda error: SIGMA / (2 * math.sqrt(error + 1e-10)),
    "ghuber": lambda error: SIGMA * (error + 1e-10) ** -0.75,
}


@pytest.mark.parametrize(
    ("weighting", "expected"),
    [("uniform", -0.25), ("t", -0.125), ("t2", -0.0625), ("huber", -0.249995), ("ghuber", -1.4078890)],
)
def test_likelihoods_by_hand(weighting: str, expected: float) -> None:
    output = torch.tensor([[0.5, -0.5]], dtype=torch.float64)
    assert log_likelihood(output, torch.zeros_like(output), 0.5, weighting).tolist() == pytest.approx([expected])


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_a_perfect_fit_is_the_most_likely_and_has_a_finite_gradient(weighting: str) -> None:
    output = TARGET.clone().requires_grad_()
    best = log_likelihood(output, TARGET, SIGMA, weighting)
    best.sum().backward()
    assert best.abs().max() < 1e-12 and output.grad is not None and not output.grad.any()
    near, far = (log_likelihood(TARGET + d, TARGET, SIGMA, weighting) for d in (0.1, 0.2))
    assert (far < near).all() and (near < 0).all()


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_the_on_policy_gradient_is_advantage_weighted_flow_matching(weighting: str) -> None:  # T29 (9d)
    output = OUTPUT.clone().requires_grad_()
    log_prob = log_likelihood(output, TARGET, SIGMA, weighting)
    losses = clipped_policy_loss(log_prob, log_prob.detach(), ADVANTAGES, 1e-4, 1e-4)[0]
    assert losses.tolist() == (-ADVANTAGES).tolist()
    (got,) = torch.autograd.grad(losses.sum(), output)
    matching = 2 / 6 * (OUTPUT - TARGET)
    slopes = [SLOPES[weighting](error) for error in ((OUTPUT - TARGET) ** 2).mean((1, 2)).tolist()]
    factors = ADVANTAGES * torch.tensor(slopes, dtype=torch.float64)
    torch.testing.assert_close(got, factors.view(-1, 1, 1) * matching, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_off_policy_the_gradient_is_weighted_with_the_ratio_of_likelihoods(weighting: str) -> None:
    def gradient(old: torch.Tensor) -> torch.Tensor:
        output = OUTPUT.clone().requires_grad_()
        log_prob = log_likelihood(output, TARGET, SIGMA, weighting)
        losses = clipped_policy_loss(log_prob, log_likelihood(old, TARGET, SIGMA, weighting), ADVANTAGES, 1.0, 1e9)[0]
        return torch.autograd.grad(losses.sum(), output)[0]

    ratio = (log_likelihood(OUTPUT, TARGET, SIGMA, weighting) - log_likelihood(OLD, TARGET, SIGMA, weighting)).exp()
    torch.testing.assert_close(gradient(OLD), ratio.view(-1, 1, 1) * gradient(OUTPUT), rtol=1e-9, atol=1e-12)


def test_the_settings_are_those_of_the_configuration() -> None:
    config = algorithm_config("awm", weighting="t2", clip_low=0.035, clip_high=0.2)
    losses, metrics = AWM(Config(algorithm=config)).loss(noised(OUTPUT, TARGET, ADVANTAGES, old=OLD))
    log_prob, old = (-(SIGMA**2) * ((v - TARGET) ** 2).mean((1, 2)) for v in (OUTPUT, OLD))
    torch.testing.assert_close(losses, clipped_policy_loss(log_prob, old, ADVANTAGES, 0.035, 0.2)[0])
    # ratios 0.970, 0.960, 1.316, 1.461, 1.164, 2.438
    assert metrics == {
        "clip_fraction_low": pytest.approx(1 / 6),
        "clip_fraction_high": pytest.approx(2 / 6),
        "log_ratio_mean": pytest.approx(float((log_prob - old).mean()), rel=1e-5),
    }


class Thorough(AWM):
    """Leaves no row out."""

    @property
    def needs_all_samples(self) -> bool:
        return True


def test_rows_without_advantage_are_run_only_for_their_distances() -> None:
    made = training.Training(training.config("awm"))
    credit = training.chain_credit([1.0, 0.0, -1.0, 0.5, 0.0, 0.0, 0.0, 0.0])
    with counted_rows(made.policy.pipe) as rows:
        left_out, _ = made.gradient(credit)
        few = rows.total()
        rows.clear()
        everything, _ = made.gradient(credit, algorithm=Thorough(made.config))
        assert few * 8 == rows.total() * 3
    assert training.relative(left_out, everything) < 1e-5
    for key in ("kl_coef", "old_kl_coef", "norm_coef"):
        assert AWM(training.config("awm", **{key: 0.1})).needs_all_samples
