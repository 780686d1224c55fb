"""Rollouts: what is kept of a task trains the same, and pipelines that take one prompt per call are called so."""

import logging
from importlib import import_module
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
import training
from diffusers.pipelines.pipeline_utils import AudioPipelineOutput
from drills import more
from replaying import randomise
from zoo import text_to_image
from zoo.base import Entry
from zoo.checks import build, call_for

from gerl.algorithms import batches_of, build_algorithm, count_pairs
from gerl.algorithms.planning import plan_samples
from gerl.commandline.composition import compose_run
from gerl.config import Config, ValidationConfig
from gerl.engine import Trajectory
from gerl.errors import ModelError
from gerl.model.errors import CallRefused
from gerl.model.loading import load_policy
from gerl.model.policy import EMA, Policy
from gerl.protocol import Prompt, RolloutTask
from gerl.workers.actor import Actor
from gerl.workers.rollout import FORMATS, Rollout, count_blank, divided, to_uint8

# preset -> bound of the share of the recorded bytes that is kept; grpo_guard reads the recorded means
KEPT = {"flow_grpo": 0.43, "flow_grpo_fast": 0.38, "awm_fast": 0.7, "branch_grpo": 0.58, "grpo_guard": 0.7}
PRX = next(e for e in text_to_image.ENTRIES if e.name == "PRXPipeline")
LITE = next(e for e in text_to_image.ENTRIES if e.name == "DreamLitePipeline")
CALLS = {"PRXPipeline": {"use_resolution_binning": False}, "DreamLitePipeline": {"max_sequence_length": 16}}


@more
@pytest.mark.parametrize("preset", KEPT)
def test_a_trajectory_is_smaller_than_the_recording_and_trains_the_same(preset: str) -> None:
    config = compose_run([f"algorithm={preset}", "rollout.micro_batch_size=4"]).config
    policy = load_policy(config.model, 0.9, "cpu", seed=0)
    randomise(policy.trained.values(), 0.05, seed=0)
    algorithm, rollout = build_algorithm(config), Rollout(policy, config.sampling, config.validation)
    samples = plan_samples(config, [Prompt(0, 'a red sign that reads "482"')], 1, 0)
    (task,) = algorithm.plan(samples[:4])
    pixels, recorded, _ = rollout.sample(task)
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


# of 4 samples of a prompt, 2 in a micro-batch, 10 steps: as many evaluations of a micro-batch as its denoiser takes
@pytest.mark.parametrize(
    ("algorithm", "overrides", "evaluations"),
    [
        ("flow_grpo", [], 2 * (1 + 9 * 2)),
        ("flow_grpo", ["sampling.window_range=[3,6]"], 2 * (4 + 6 * 2)),
        (
            "flow_grpo",
            ["sampling.window_range=[3,6]", "sampling.guidance_scale=2", "sampling.solver=dpm2"],
            4 * (4 + 6 * 2),
        ),
        ("flow_grpo", ["sampling.same_init_noise=false"], 2 * 20),
        (
            "mix_grpo_flash",
            ["sampling.window_range=[2,4]", "sampling.window_size=2", "sampling.num_inference_steps=10"],
            2 * (3 + 4 * 2),
        ),
    ],
)
def test_a_group_shares_its_beginning(algorithm: str, overrides: list[str], evaluations: int) -> None:
    own = {override.partition("=")[0] for override in overrides}
    made = ["rollout.micro_batch_size=2", "rollout.n=4", *overrides]
    made += [] if "sampling.guidance_scale" in own else ["sampling.guidance_scale=1"]
    config = compose_run([f"algorithm={algorithm}", *made]).config
    policy = load_policy(config.model, 0.9, "cpu", seed=0)
    randomise(policy.trained.values(), 0.05, seed=0)
    tasks = build_algorithm(config).plan(plan_samples(config, [Prompt(0, 'a red sign that reads "482"')], 1, 0))
    block, counted, found = policy.pipe.transformer.transformer_blocks[0], [], []
    hook = block.register_forward_pre_hook(lambda m, a, k: counted.append(len(k["hidden_states"])), with_kwargs=True)
    for shares in (True, False):
        rollout = Rollout(policy, config.sampling, config.validation, shares)
        rollout.sample(tasks[0])  # looks at the structure of a call as well
        counted.clear()
        found.append([rollout.sample(task) for task in tasks])
        assert sum(counted) == evaluations or (not shares and sum(counted) >= evaluations), sum(counted)
    hook.remove()
    for (images, (tape,), task), (alone, (whole,), same) in zip(*found, strict=True):
        assert task == same and int(np.abs(images.astype(int) - alone).max()) <= 1
        for k, (step, other) in enumerate(zip(tape.steps, whole.steps, strict=True)):
            assert torch.allclose(step.x_next, other.x_next, atol=1e-4), k
            assert (step.log_prob is None) == (other.log_prob is None) and step.rule == other.rule


def test_an_argument_that_is_null_is_not_given() -> None:
    drawn = []
    for call in ({}, {"negative_prompt": None, "sigmas": None}):
        made = training.Training(training.config("flow_grpo", steps=2))
        made.config.sampling.call.update(call)
        drawn.append(made.rollout.validate([task.samples[0] for task, _, _ in made.tasks])[0])
        task = made.tasks[0][0]
        assert np.array_equal(made.rollout.generate(task, made.algorithm)[0], made.tasks[0][1])
    assert np.array_equal(*drawn)


def test_a_validation_whose_scheduler_draws_noise_has_the_same_images_again() -> None:
    config = compose_run(["algorithm=flow_grpo", "sampling.kernel=cps", "validation.num_inference_steps=2"]).config
    policy = load_policy(config.model, 0.9, "cpu", seed=0)
    policy.pipe.scheduler = diffusers.FlowMatchLCMScheduler(shift=3.0)
    rollout = Rollout(policy, config.sampling, config.validation)
    samples = plan_samples(config, [Prompt(0, 'a red sign that reads "482"')], 1, 0)[:2]
    first = rollout.validate(samples)[0]
    torch.rand(3)  # the global generator has moved on
    assert np.array_equal(rollout.validate(samples)[0], first) and not np.array_equal(first[0], first[1])


def test_images_of_a_single_colour_are_counted() -> None:
    images = np.zeros((4, 40, 50, 3), np.uint8)
    images[1, 20, 33, 2] = 1  # a single pixel differs
    images[2] = (3, 200, 7)
    assert count_blank(images) == 3 and count_blank([images[1], np.zeros((2, 8, 8, 3), np.uint8)]) == 1  # and a video


PIXELS = np.full((2, 4, 4, 3), 0.5, dtype=np.float32)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("pipeline_utils.ImagePipelineOutput", {"images": PIXELS}),
        ("kandinsky5.pipeline_output.KandinskyImagePipelineOutput", {"image": torch.from_numpy(PIXELS)}),
        ("ltx2.pipeline_output.LTX2PipelineOutput", {"frames": PIXELS[:, None], "audio": torch.zeros(2, 2, 100)}),
    ],
)
def test_the_images_of_an_output_are_found_under_any_name(kind: str, fields: dict[str, Any]) -> None:
    module, _, name = kind.rpartition(".")
    output = getattr(import_module(f"diffusers.pipelines.{module}"), name)
    assert np.array_equal(to_uint8(output(**fields)), np.full((2, 4, 4, 3), 128, dtype=np.uint8))


def test_sound_alone_is_refused() -> None:
    with pytest.raises(ModelError, match=r"returned sound \(audios \[1, 2, 100\]\).*images and videos"):
        to_uint8(AudioPipelineOutput(audios=np.zeros((1, 2, 100))))


def test_the_images_of_kandinsky_5_are_drawn() -> None:
    entry = next(e for e in text_to_image.ENTRIES if e.name == "Kandinsky5T2IPipeline")
    pipe, _ = build(entry)
    output = pipe(**call_for(entry, pipe, guided=False) | {"output_type": "np"})
    assert to_uint8(output).shape == (4, 32, 32, 3)


# --- pipelines that take one prompt per call


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
    assert np.array_equal(rollout.sample(single)[0][0], pixels[2])
    assert rollout.validate(task.samples)[0].shape == pixels.shape


@pytest.mark.parametrize("name", ["flow_grpo", "branch_grpo"])
def test_samples_drawn_one_by_one_train_as_those_drawn_together(name: str) -> None:
    config = config_of(PRX, 1.0, name)
    rollout = rollout_of(PRX, config)
    task, together, whole = drawn(rollout, config)
    expected = gradient(rollout, config, task, whole)
    rollout.format.formats["rollout"] = FORMATS[1]
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
    assert "rollout" not in rollout.format.formats
