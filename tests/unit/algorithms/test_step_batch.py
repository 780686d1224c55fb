"""`actor.step_batch`: for every algorithm the gradient and the statistics of its steps one by one, but for rounding."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import training

from gerl.config.algorithms import algorithm_config
from gerl.config.registry import ALGORITHMS

NEEDS: dict[str, dict[str, Any]] = {
    "branch_grpo": {"n": 1, "split_steps": [0, 1]},
    "tempflow_grpo": {"n": 1, "branch_factor": 2},
    "tree_grpo": {"n": 1, "split_steps": [0, 1]},
    "fdfo": {"sampling_kernel": "cps", "sampling_noise_level": 0.045, "sampling_window_range": [0, 3]},
}


# a gradient of the reward goes back step by step: nothing of it is together
@pytest.mark.parametrize(
    "name", [name for name in sorted(ALGORITHMS) if not algorithm_config(name).needs.reward_gradient]
)
def test_steps_in_one_pass_train_the_same(name: str) -> None:
    settings = NEEDS.get(name, {})
    joint = training.config(name, **settings).algorithm.cfg == "joint"
    c = training.config(name, guidance=4.5 if joint else 1.0, **settings)
    made = training.Training(c)
    samples = [sample for task, _, _ in made.tasks for sample in task.samples]
    credit = made.algorithm.credit(training.rewards(samples, torch.linspace(0, 1, len(samples)).tolist()))
    single, stats = made.gradient(credit)
    several = type(made.algorithm)(replace(c, actor=replace(c.actor, step_batch=3)))
    stacked, again = made.gradient(credit, algorithm=several)
    assert float(single.norm()) > 0 and training.relative(stacked, single) < 1e-3
    assert again.sums == pytest.approx(stats.sums, rel=1e-3, abs=1e-5)
