"""Rollouts: the trajectory that is kept of a task is smaller than what was recorded, and trains the same."""

import numpy as np
import pytest
import torch
from replaying import randomise

from gerl.algorithms import build_algorithm, count_pairs
from gerl.algorithms.planning import plan_samples
from gerl.commandline.composition import compose_run
from gerl.engine import Trajectory
from gerl.model.loading import load_policy
from gerl.protocol import Prompt
from gerl.workers.actor import Actor
from gerl.workers.hybrid import batches_of
from gerl.workers.rollout import Rollout

# preset -> bound of the share of the recorded bytes that is kept; grpo_guard reads the recorded means
KEPT = {"flow_grpo": 0.43, "flow_grpo_fast": 0.38, "awm_fast": 0.7, "branch_grpo": 0.58, "grpo_guard": 0.7}


@pytest.mark.parametrize("preset", KEPT)
def test_a_trajectory_is_smaller_than_the_recording_and_trains_the_same(preset: str) -> None:
    config = compose_run([f"algorithm={preset}", "rollout.micro_batch_size=4"]).config
    policy = load_policy(config.model, 0.9, "cpu", seed=0)
    randomise(policy.lora.values(), 0.05, seed=0)
    algorithm, rollout = build_algorithm(config), Rollout(policy, config.sampling, config.validation)
    samples = plan_samples(config, [Prompt(0, 'a red sign that reads "482"')], 1, 0)
    (task,) = algorithm.plan(samples[:4])
    pixels, recorded = rollout.draw(task)
    images, kept = rollout.generate(task, algorithm, owner=3)
    assert np.array_equal(images, pixels) and (kept.owner, kept.policy_version, kept.task) == (3, 0, task)
    whole = Trajectory(task, tuple(recorded), 0, 3)

    actor = Actor(policy, config.actor, algorithm, total_updates=1)
    credit = torch.linspace(-1, 1, len(task.samples))[:, None].expand(-1, config.sampling.num_inference_steps)
    found = []
    for trajectory in (whole, kept):
        actor.optimizer.zero_grad(set_to_none=True)
        stats = actor.accumulate(batches_of(trajectory, credit), count_pairs([(task, credit)]))
        found.append((stats, actor.flat_gradient()))
    (stats, gradient), (lean_stats, lean_gradient) = found
    assert stats == lean_stats and torch.equal(gradient, lean_gradient) and float(gradient.norm()) > 0
    assert 0 < kept.nbytes < KEPT[preset] * whole.nbytes
