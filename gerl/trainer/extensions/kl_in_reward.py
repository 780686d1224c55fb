"""Subtract the KL to the base model from the rewards (algorithm.kl_in_reward)."""

from dataclasses import replace

import torch

from gerl.algorithms import batches_of
from gerl.config import Config
from gerl.model.errors import model_errors
from gerl.trainer.run import Extension, Run
from gerl.trainer.step import Step, mean
from gerl.workers.worker import PolicyWorker


class KLInReward(Extension):
    """Subtract each sample's KL from its reward before the credit is computed."""

    @classmethod
    def wanted(cls, config: Config) -> bool:
        return config.algorithm.subtracts_kl

    def rewarded(self, run: Run, step: Step) -> None:
        coef = run.algorithm.kl_coef
        if coef <= 0 or step.rewards is None:
            return
        with step.watch("update"):
            kl = [value for values in run.fleet.on_trajectories(kl_to_base) for value in values]
        paid = torch.tensor(kl) if step.kl_weight is None else step.kl_weight * torch.tensor(kl)
        step.rewards = replace(step.rewards, totals=step.rewards.totals - coef * paid[list(step.rewards.rows)])
        step.metrics["reward/kl"] = mean(kl)


def kl_to_base(worker: PolicyWorker, task_id: int) -> list[float]:
    """Return the KL `[B]` of the samples of a task to the base model."""
    trajectory = worker.trajectories[task_id]
    steps = worker.config.sampling.num_inference_steps
    batches = batches_of(trajectory, torch.zeros(len(trajectory.task.samples), steps))
    with model_errors("update"):
        return [float(v) for batch in batches for v in worker.algorithm.kl_to_base(worker.policy, batch)]
