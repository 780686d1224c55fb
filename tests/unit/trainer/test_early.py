"""Whose groups are credited by themselves, so that an update may begin with them."""

import time
from typing import Any

import pytest
import torch
import training

from gerl.algorithms import KLWeight, Rewards, build_algorithm
from gerl.algorithms.flow_grpo import FlowGRPO
from gerl.cluster import Pending
from gerl.protocol import RolloutTask, UpdateStats
from gerl.trainer.extensions.early import EarlyGradient
from gerl.utils.tensors import PackedTensors


@pytest.mark.parametrize(
    ("name", "keys", "alone"),
    [
        ("flow_grpo", {"advantage_std": "group"}, True),
        ("flow_grpo", {"advantage_std": "batch"}, False),
        ("flow_grpo", {"advantage_std": "group", "history": 4}, False),
        ("flow_grpo", {"advantage_std": "group", "adv_estimator": "gdpo"}, False),
        ("awm", {"advantage_std": "none"}, True),
        ("tempflow_grpo", {"advantage_std": "group"}, False),
        ("kto", {}, False),
    ],
)
def test_the_credit_of_a_group_depends_on_its_own_images(name: str, keys: dict[str, Any], alone: bool) -> None:
    algorithm = build_algorithm(training.config(name, **keys))
    assert algorithm.credits_groups_alone == alone
    if alone:
        samples = training.samples_of([0, 0, 1, 1])
        both = algorithm.credit(training.rewards(samples, [0.1, 0.7, 0.3, 0.4]))
        one = algorithm.credit(training.rewards(samples[2:], [0.3, 0.4]))
        assert torch.equal(both[2:].nan_to_num(), one.nan_to_num())


def test_a_subclass_with_a_credit_of_its_own_waits_for_all_scores() -> None:
    class Ranked(FlowGRPO):
        def advantages(self, rewards: Rewards) -> torch.Tensor:
            return rewards.totals.argsort().float()

    assert not Ranked(training.config("flow_grpo", advantage_std="group")).credits_groups_alone


def test_only_time_before_the_last_score_is_overlap() -> None:
    config, now = training.config("flow_grpo"), time.time()
    algorithm, credit = build_algorithm(config), PackedTensors({0: torch.ones(2, 1)})
    tasks = [RolloutTask(0, training.samples_of([0, 0]), ())]
    trainers: Any = [None]  # one trainer, which is not called again
    nobody: Any = None
    calls = [Pending("trainer", value=(UpdateStats(), now - 2.0, now + 3600.0))]
    early = EarlyGradient(config, algorithm, trainers, nobody, tasks, [0], 2, credit, calls)
    assert early.complete(credit, 2, KLWeight(algorithm.kl_coef)) == UpdateStats()
    assert 2.0 <= early.overlap < 1800.0
