"""The weight of the KL at which its gradient is as large as the reward's."""

import math
from pathlib import Path

import pytest
import torch
from running import loaded

from gerl.algorithms import KLWeight, count_pairs
from gerl.algorithms.planning import plan_samples
from gerl.cluster import Cluster
from gerl.commandline.composition import compose_run
from gerl.protocol import Prompt
from gerl.trainer.run import Run
from gerl.workers.kl_gradient import balancing_weight

PROMPTS = [Prompt(n, f'a sign that says "{word}"') for n, word in enumerate(("OPEN", "EXIT"))]
SMALL = """
experiment=signs rollout.prompts_per_step=2 rollout.n=2 rollout.micro_batch_size=4 actor.micro_batch_size=2
sampling.num_inference_steps=4 sampling.window_range=[1,3] reward.scorers={sharpness:{}} cluster.launcher=local
"""


def gradient(run: Run, credit: dict[int, torch.Tensor], pairs: int, coef: float) -> torch.Tensor:
    (worker,) = run.fleet.workers.run(lambda worker: worker)
    run.fleet.accumulate(credit, pairs, KLWeight(coef))
    found: torch.Tensor = worker.actor.flat_gradient()
    worker.actor.optimizer.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("algorithm", ["awm", "flow_grpo", "dgpo"])  # forward process, chain, and sums over groups
def test_the_gradients_are_equally_large(algorithm: str, tmp_path: Path) -> None:
    config = compose_run([*SMALL.split(), f"algorithm={algorithm}"]).config
    with Cluster(config.cluster) as cluster:
        run = loaded(config, tmp_path, cluster, PROMPTS)
        tasks = run.algorithm.plan(plan_samples(config, PROMPTS, 1, 0))
        (worker,) = run.fleet.workers.run(lambda worker: worker)
        for task in tasks:
            worker.sample(task)
        one = torch.tensor([[1.0], [-1.0]]).repeat(2, config.sampling.num_inference_steps)
        credit = {task.id: one for task in tasks}
        pairs = count_pairs([(task, credit[task.id]) for task in tasks])
        assert math.isnan(balancing_weight(run.fleet, credit, pairs, KLWeight(0.0)))  # the policy is the base model
        torch.manual_seed(0)
        for p in worker.actor.parameters:
            p.data.normal_(0, 1e-3)  # so that the gradient of the KL is small beside the reward's
        weight = balancing_weight(run.fleet, credit, pairs, KLWeight(0.0))
        plain = gradient(run, credit, pairs, 0.0)
        assert (gradient(run, credit, pairs, weight) - plain).norm() == pytest.approx(float(plain.norm()), rel=1e-3)
        assert weight > 10 and worker.evaluations.taken() != (0, 0) and not worker.actor.subtracted
