"""Pipelines that take one prompt per call are drawn and trained one sample at a time."""

import logging

import numpy as np
import pytest
import torch
import training
from zoo.base import Entry
from zoo.checks import build
from zoo.text_to_image_2 import ENTRIES
from zoo.text_to_image_3 import ENTRIES as ONE_PROMPT

from gerl.algorithms import build_algorithm, count_pairs
from gerl.algorithms.planning import plan_samples
from gerl.config import Config, ValidationConfig
from gerl.engine import Trajectory
from gerl.errors import ModelError
from gerl.model.ema import EMA
from gerl.model.failures import CallRefused
from gerl.model.policy import Policy
from gerl.protocol import RolloutTask
from gerl.workers.actor import Actor
from gerl.workers.hybrid import batches_of
from gerl.workers.rollout import Rollout
from gerl.workers.ways import WAYS, divided

PRX = next(e for e in ENTRIES if e.name == "PRXPipeline")
LITE = next(e for e in ONE_PROMPT if e.name == "DreamLitePipeline")
CALLS = {"PRXPipeline": {"use_resolution_binning": False}, "DreamLitePipeline": {"max_sequence_length": 16}}


def rollout_of(entry: Entry, config: Config) -> Rollout:
    pipe, lora = build(entry)
    denoiser = pipe.unet if hasattr(pipe, "unet") else pipe.transformer
    named = {str(i): p for i, p in enumerate(lora[next(iter(lora))])}
    policy = Policy(pipe, {"denoiser": denoiser}, named, EMA(named, 0.9))
    validation = ValidationConfig(num_inference_steps=2, guidance_scale=config.sampling.guidance_scale)
    return Rollout(policy, config.sampling, validation)


def config_of(entry: Entry, guidance: float, name: str = "flow_grpo") -> Config:
    keys = {"split_steps": (1,), "branch_factor": 2} if name == "branch_grpo" else {}
    return training.config(name, guidance=guidance, sampling_call=CALLS[entry.name], **keys)


def drawn(rollout: Rollout, config: Config) -> tuple[RolloutTask, np.ndarray, Trajectory]:
    algorithm = build_algorithm(config)
    task = algorithm.plan(plan_samples(config, training.PROMPTS, 1, 0)[:4])[0]
    return task, *rollout.generate(task, algorithm)


def gradient(rollout: Rollout, config: Config, task: RolloutTask, trajectory: Trajectory) -> torch.Tensor:
    actor = Actor(rollout.policy, config.actor, build_algorithm(config), total_updates=1)
    actor.optimizer.zero_grad(set_to_none=True)
    credit = torch.linspace(-1, 1, len(task.samples))[:, None].expand(-1, config.sampling.num_inference_steps)
    actor.accumulate(batches_of(trajectory, credit), count_pairs([(task, credit)]))
    return actor.flat_gradient()


@pytest.mark.parametrize("entry", [PRX, LITE], ids=lambda e: e.name)
def test_a_pipeline_that_takes_one_prompt_a_call(entry: Entry, caplog: pytest.LogCaptureFixture) -> None:
    config = config_of(entry, 3.0)
    rollout = rollout_of(entry, config)
    with caplog.at_level(logging.INFO, "gerl"):
        task, pixels, trajectory = drawn(rollout, config)
    assert f"{entry.name} takes one prompt per call" in caplog.text
    assert pixels.shape == (4, 16, 16, 3) and len(trajectory.tapes) == 4
    part = trajectory.rows([2, 0])
    assert [id(t) for t in part.tapes] == [id(trajectory.tapes[i]) for i in (2, 0)] and part.task.samples[
        0
    ] == task.samples[2]
    assert float(gradient(rollout, config, task, trajectory).norm()) > 0
    (alone,) = divided(task, 1).segments[2:3]
    single = RolloutTask(9, [task.samples[2]], (alone.__class__(**{**vars(alone), "leaves": (0,)}),))
    assert np.array_equal(rollout.draw(single)[0][0], pixels[2])
    assert rollout.validate(task.samples).shape == pixels.shape


@pytest.mark.parametrize("name", ["flow_grpo", "branch_grpo"])
def test_samples_drawn_one_by_one_train_as_those_drawn_together(name: str) -> None:
    config = config_of(PRX, 1.0, name)
    rollout = rollout_of(PRX, config)
    task, together, whole = drawn(rollout, config)
    expected = gradient(rollout, config, task, whole)
    rollout.ways.found["rollout"] = WAYS[1]
    _, apart, parts = drawn(rollout, config)
    assert len(parts.tapes) > len(whole.tapes) and np.abs(apart.astype(int) - together).max() <= 1
    assert float((gradient(rollout, config, task, parts) - expected).norm() / expected.norm()) < 1e-3


@pytest.mark.parametrize("name", ["dgpo", "fdfo"])
def test_a_loss_over_several_images_needs_them_in_one_call(name: str) -> None:
    config = config_of(PRX, 3.0, name)
    with pytest.raises(ModelError, match=rf"PRXPipeline takes one prompt per call.*algorithm.name={name}"):
        drawn(rollout_of(PRX, config), config)


def test_a_pipeline_that_refuses_every_way_says_why_it_refused_the_first() -> None:
    config = config_of(PRX, 3.0)
    rollout = rollout_of(PRX, config)
    rollout.sampling.call["height"] = 17
    with pytest.raises(CallRefused, match=r"divisible by.*sampling\.call\.height=17"):
        drawn(rollout, config)
    assert "rollout" not in rollout.ways.found
