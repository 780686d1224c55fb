"""Every choice that a key offers is treated, as one of its own: a new one that falls through to another would show."""

from typing import get_args

import pytest
import torch

from gerl.algorithms import Rewards, build_algorithm
from gerl.algorithms.awm import log_likelihood
from gerl.algorithms.core_algos import LEVEL_WEIGHTS, group_advantages, kl_divergence, step_weights
from gerl.algorithms.planning import sde_window
from gerl.config import Config, SamplingConfig, algorithm_config, blocks
from gerl.engine.transitions import OdeSolver, coefficients
from gerl.protocol import Prompt, Sample

GENERATOR = torch.Generator().manual_seed(3)


def kl(kind: blocks.KLKind) -> object:
    values = [torch.randn(2, 5, generator=GENERATOR.manual_seed(k)) for k in range(4)]
    log_probs = {"log_prob": values[0][:, 0], "ref_log_prob": values[1][:, 0]}
    means = {"mean": values[0], "ref_mean": values[1], "output": values[2], "ref_output": values[3]}
    return kl_divergence(kind, std=0.3, dt=-0.1, **means, **log_probs).tolist()


def advantages(estimator: blocks.AdvantageEstimator) -> object:
    algorithm = build_algorithm(Config(algorithm=algorithm_config(adv_estimator=estimator)))
    samples = [Sample(Prompt(i // 3, "a"), i % 3, i, 1) for i in range(6)]
    columns = torch.tensor([[1.0, 0.5, 4.0, 2.0, 0.0, 1.0], [0.1, 0.7, 0.2, 0.9, 0.3, 0.8]]).T
    rewards = Rewards(samples, columns.sum(1), columns, torch.ones(2), values=torch.zeros(6, 2))  # of a critic
    return algorithm.advantages(rewards).tolist()


def windows(schedule: blocks.WindowSchedule) -> object:
    sampling = SamplingConfig(window_size=2, window_schedule=schedule, window_every=3)
    return [sde_window(Config(sampling=sampling), step) for step in range(1, 20)]


def scaled(std: blocks.StdKind) -> object:
    return group_advantages(torch.tensor([1.0, 2.0, 5.0, 9.0]), torch.tensor([0, 0, 1, 1]), std).tolist()


@pytest.mark.parametrize(
    ("kind", "treated"),
    [
        (blocks.KernelName, lambda name: coefficients(name, 0.7, 0.6, 0.5, 0.9)),
        (blocks.SolverName, lambda name: OdeSolver(name).second_order),
        (blocks.WindowSchedule, windows),
        (blocks.AdvantageEstimator, advantages),
        (blocks.StdKind, scaled),
        (blocks.KLKind, kl),
        (
            blocks.LikelihoodWeighting,
            lambda name: log_likelihood(torch.full((1, 2), 2.0), torch.zeros(1, 2), 0.6, name),
        ),
        (blocks.StepWeighting, lambda name: step_weights(name, [0.1, 0.3], [-0.2, -0.5], [0.5, 0.7])),
    ],
)
def test_every_choice_is_treated(kind: object, treated: object) -> None:
    names = LEVEL_WEIGHTS if kind is blocks.StepWeighting else get_args(kind)
    assert len({str(treated(name)) for name in names}) == len(names) > 1  # type: ignore[operator]
