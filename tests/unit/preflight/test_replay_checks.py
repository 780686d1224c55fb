"""The checks of a pipeline by itself: what a rollout draws is what it draws, and its samples are independent."""

import functools
from dataclasses import replace
from typing import Any

import diffusers
import pytest
import torch
import training

from gerl.algorithms import build_algorithm
from gerl.algorithms.planning import plan_samples
from gerl.config import ActorConfig, ValidationConfig
from gerl.preflight.findings import Report
from gerl.preflight.replay_checks import judge_faithful, parts_difference, stock_difference
from gerl.workers.actor import Actor
from gerl.workers.rollout import Rollout
from gerl.workers.worker import PolicyWorker


class StepsItsOwnWay(diffusers.StableDiffusion3Pipeline):
    """Steps in a way of its own unless gerl is watching."""

    @functools.wraps(diffusers.StableDiffusion3Pipeline.__call__)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own = self.scheduler.step
        stock = hasattr(own, "__func__")  # not routed to gerl

        def step(v: torch.Tensor, t: torch.Tensor, x: torch.Tensor, **options: Any) -> Any:
            return own(-v if stock else v, t, x, **options)

        self.scheduler.step = step
        try:
            return super().__call__(*args, **kwargs)
        finally:
            self.scheduler.step = own


def worker_of(cls: type = diffusers.StableDiffusion3Pipeline, mixes: bool = False) -> PolicyWorker:
    policy, config = training.new_policy(), training.config("flow_grpo")
    policy.pipe = cls(**policy.pipe.components)
    policy.pipe.set_progress_bar_config(disable=True)
    if mixes:
        layer = policy.pipe.transformer.transformer_blocks[0].attn.to_q
        layer.register_forward_hook(lambda m, args, out: out + 0.5 * out[:1])  # every sample sees the first one
    worker = PolicyWorker(config, 0, "cpu", 1, 1)
    worker.policy, worker.algorithm = policy, build_algorithm(config)
    worker.rollout = Rollout(policy, config.sampling, ValidationConfig())
    worker.actor = Actor(policy, config.actor, worker.algorithm, 1)
    return worker


def measured(worker: PolicyWorker) -> tuple[float, float]:
    task = worker.algorithm.plan(plan_samples(worker.config, training.PROMPTS, 1, 0)[:4])[0]
    return stock_difference(worker.rollout, task.samples), parts_difference(worker, task)


def problems(stock: float, parts: float, micro: int | None = None, half: bool = False) -> list[str]:
    report = Report("signs", "flow_grpo", pipeline="MyPipeline", stock_difference=stock, parts_difference=parts)
    config = replace(training.config("flow_grpo"), actor=ActorConfig(micro_batch_size=micro))
    judge_faithful(report, config, half)
    return report.problems


def test_a_pipeline_that_is_as_it_should_be() -> None:
    worker = worker_of()
    stock, parts = measured(worker)
    assert stock < 1e-6 and 0 < parts < 1e-4
    assert problems(stock, parts, micro=1) == []
    assert all(p.grad is None for p in worker.policy.trained.values())


def test_a_pipeline_that_steps_otherwise_than_it_seems() -> None:
    stock, _ = measured(worker_of(StepsItsOwnWay))
    assert stock > 0.1
    (problem,) = problems(stock, 0.0)
    assert "differ from those of MyPipeline" in problem and "use another pipeline" in problem


def test_samples_that_depend_on_each_other() -> None:
    stock, parts = measured(worker_of(mixes=True))
    assert stock < 1e-6 and parts > 0.01
    (problem,) = problems(stock, parts, micro=2)
    assert "add up to one that differs" in problem and "set actor.micro_batch_size=8" in problem
    assert problems(stock, parts) == []


@pytest.mark.parametrize("half", [False, True])
def test_half_precision_may_round_more(half: bool) -> None:
    assert len(problems(0.02, 0.02, micro=1, half=half)) == (0 if half else 2)
    assert len(problems(float("nan"), 0.5, micro=1, half=half)) == 2
