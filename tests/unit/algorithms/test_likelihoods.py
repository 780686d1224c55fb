"""The likelihood of a step in the ratio: the Gaussian's, or the squared error that is published with CPS."""

import pytest
import torch
from training import Training, chain_credit, config, relative

from gerl.algorithms import PolicyGradient, build_algorithm
from gerl.config import from_mapping
from gerl.engine import ReplayedStep, replay
from gerl.errors import ConfigError

ADVANTAGES = [1.0, -1.0, 0.5, -0.5, 2.0, -2.0, 0.1, -0.1]
CREDIT = chain_credit(ADVANTAGES)
CPS = {"sampling_kernel": "cps", "sampling_noise_level": 0.8, "sampling_window_range": [0, 3]}


@pytest.fixture(scope="module")
def training() -> Training:
    return Training(config("grpo_guard", **CPS))  # type: ignore[arg-type]  # its tapes keep the means


def squared(**keys: float) -> PolicyGradient:
    found = build_algorithm(config("flow_grpo", likelihood="squared_error", **CPS, **keys))  # type: ignore[arg-type]
    assert isinstance(found, PolicyGradient)
    return found


def published(step: ReplayedStep) -> torch.Tensor:
    """-(x' - mean)^2, mean but for the batch: yifan123/flow_grpo sd3_sde_with_logprob.py:86-89."""
    assert step.x_next is not None
    return -((step.x_next - step.mean) ** 2).mean(dim=(1, 2, 3))


def test_on_policy_it_is_the_gradient_of_the_published_likelihood(training: Training) -> None:
    found, stats = training.gradient(CREDIT, algorithm=squared())
    assert stats.ratio_deviation == 0 and stats.pairs == 24
    (_, _, (tape,)) = training.tasks[0]
    training.actor.optimizer.zero_grad(set_to_none=True)
    replay(training.policy.pipe, tape, lambda k, s: -(torch.tensor(ADVANTAGES) * published(s)).sum() / 24)
    assert relative(found, training.actor.flat_gradient()) < 1e-5 and found.norm() > 0


def test_off_policy_the_ratio_is_that_of_squared_errors(training: Training) -> None:
    algorithm, plain, found = squared(), build_algorithm(config("flow_grpo", **CPS)), []  # type: ignore[arg-type]
    assert isinstance(plain, PolicyGradient)
    (_, _, (tape,)) = training.tasks[0]
    before = {name: p.detach().clone() for name, p in training.policy.trained.items()}
    generator = torch.Generator().manual_seed(1)
    for p in training.policy.trained.values():
        p.data.add_(0.05 * torch.randn(p.shape, generator=generator))

    def on_step(k: int, step: ReplayedStep) -> None:
        assert step.x_next is not None and step.recorded_mean is not None
        old = -((step.x_next - step.recorded_mean) ** 2).mean(dim=(1, 2, 3))
        expected = published(step) - old
        torch.testing.assert_close(algorithm.log_ratio(step), expected, rtol=2e-3, atol=1e-6)
        torch.testing.assert_close(algorithm.log_ratio(step), 2 * step.std**2 * plain.log_ratio(step))
        found.append(float(expected.abs().max()))

    replay(training.policy.pipe, tape, on_step, grad=False)
    for name, p in training.policy.trained.items():
        p.data.copy_(before[name])
    assert len(found) == 3 and min(found) > 1e-4


@pytest.mark.parametrize("kind", ["gaussian", "k2", "k3"])
def test_the_kl_stays_that_of_densities(kind: str, training: Training) -> None:
    gradients = []
    for likelihood in ("gaussian", "squared_error"):
        keys = {"likelihood": likelihood, "kl_coef": 0.5, "kl_type": kind, **CPS}
        gradients.append(training.gradient(0 * CREDIT, algorithm=build_algorithm(config("flow_grpo", **keys))))  # type: ignore[arg-type]
    (one, first), (other, second) = gradients
    assert torch.equal(one, other) and first.sums["kl"] == second.sums["kl"] != 0


@pytest.mark.parametrize("name", ["grpo_guard", "flow_dppo", "tempflow_grpo", "branch_grpo"])
def test_algorithms_with_a_ratio_of_their_own_refuse_it(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} does not read it, only flow_grpo"):
        from_mapping({"algorithm": {"name": name, "likelihood": "squared_error"}})
