"""A worker with several roles: their LoRAs on one base model, their gradients and their common state."""

from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import tiny
import torch

from gerl.algorithms import build_algorithm
from gerl.algorithms.planning import plan_samples
from gerl.config import Config, from_mapping
from gerl.config.roles import role_config
from gerl.errors import CheckpointError, ConfigError
from gerl.model.policy import Policy
from gerl.protocol import Prompt, RolloutTask, Turn
from gerl.workers.roles import RoleWorker, as_pipeline, in_role
from gerl.workers.worker import PolicyWorker

PIXELS = np.random.default_rng(0).integers(0, 255, (16, 16, 3), np.uint8)
CALL = {"max_sequence_length": 8}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "sd3"
    tiny.sd3(layers=1).save_pretrained(folder)
    return folder


def config(model: Path) -> Config:
    edit = {
        "pipeline": "StableDiffusion3Img2ImgPipeline", "model.lora_rank": 2, "model.lora_alpha": 2,
        "sampling.call": CALL | {"strength": 0.5}, "sampling.window_range": [0, 1],
    }  # fmt: skip
    sampling = {"height": 16, "width": 16, "num_inference_steps": 4, "guidance_scale": 1.0, "call": CALL}
    return from_mapping(
        {
            "model": {"path": str(model), "lora_rank": 4, "lora_alpha": 4},
            "sampling": sampling,
            "rollout": {"prompts_per_step": 1, "n": 2, "micro_batch_size": 2},
            "episode": {"turns": [{"role": "draw"}, {"role": "edit"}], "roles": {"edit": edit}},
            "validation": {"data": None},
            "reward": {"scorers": {"ocr": {}}},
        }
    )


def worker(c: Config) -> RoleWorker:
    made = RoleWorker(c, 0, "cpu", 1, 10)
    made.setup()
    torch.manual_seed(5)
    for policy in (made.policy, made.others["edit"].policy):
        for p in policy.trained.values():
            p.data.normal_(0, 0.2)
    return made


def edit_task(c: Config) -> RolloutTask:
    own = role_config(c, "edit")
    prompts = [Prompt(0, "a fox", turn=Turn(1, "edit", "a red fox", PIXELS, 0))]
    return build_algorithm(own).plan(plan_samples(own, prompts, 1, 0))[0]


class Alone(PolicyWorker):
    """The policy of the role on a model of its own."""

    def load_policy(self) -> Policy:
        policy = super().load_policy()
        policy.pipe = as_pipeline(policy.pipe, "StableDiffusion3Img2ImgPipeline", "edit")
        return policy


def gradients(policy: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in policy.trained.items() if p.grad is not None}


def test_the_gradient_of_a_role_is_that_of_its_lora_alone(model: Path) -> None:
    c = config(model)
    made, task, credit = worker(c), edit_task(c), {0: torch.tensor([[1.0] * 4, [-1.0] * 4])}
    images = in_role(made, "edit", PolicyWorker.sample, task)
    stats = in_role(made, "edit", PolicyWorker.accumulate, credit, 2)
    found = gradients(made.others["edit"].policy)
    assert stats.ratio_deviation == 0.0 and not gradients(made.policy)
    assert any(gradient.any() for gradient in found.values())

    alone = Alone(role_config(c, "edit"), 0, "cpu", 1, 10)
    alone.setup()
    for name, p in alone.policy.trained.items():
        p.data.copy_(made.others["edit"].policy.trained[name.replace(".default.", ".edit.")])
    assert np.array_equal(alone.sample(task).pixels, images.pixels)
    alone.accumulate(credit, 2)
    expected = {name.replace(".default.", ".edit."): value for name, value in gradients(alone.policy).items()}
    assert sorted(found) == sorted(expected)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def test_the_other_lora_is_active_within_its_role_only(model: Path) -> None:
    c = config(model)
    made = worker(c)
    assert {name.split(".")[-2] for name in made.policy.trained} == {"default"}
    before = in_role(made, "edit", PolicyWorker.sample, edit_task(c)).pixels
    for p in made.policy.trained.values():
        p.data.zero_()
    assert np.array_equal(in_role(made, "edit", PolicyWorker.sample, edit_task(c)).pixels, before)
    for p in made.others["edit"].policy.trained.values():
        p.data.zero_()
    assert not np.array_equal(in_role(made, "edit", PolicyWorker.sample, edit_task(c)).pixels, before)


def test_the_state_is_that_of_all_roles(model: Path) -> None:
    c = config(model)
    made = worker(c)
    in_role(made, "edit", PolicyWorker.sample, edit_task(c))
    in_role(made, "edit", PolicyWorker.accumulate, {0: torch.tensor([[1.0] * 4, [-1.0] * 4])}, 2)
    in_role(made, "edit", PolicyWorker.step, 0, False, True)
    made.finish_step(1)
    files, numbers = made.checkpoint(1)
    assert {"state.safetensors", "roles/edit/lora/pytorch_lora_weights.safetensors"} <= set(files)
    assert numbers.policy_version == 0 and numbers.roles["edit"].policy_version == 1
    other = worker(c)
    other.load(files["state.safetensors"], numbers, 1)
    again, counts = other.checkpoint(1)
    assert again == files and counts == numbers
    with pytest.raises(CheckpointError, match="roles none"):
        other.load(files["state.safetensors"], type(numbers)(0, numbers.averages, True, numbers.lr_schedule), 1)


def test_a_pipeline_of_another_class_shares_the_components() -> None:
    pipe = tiny.sd3(layers=1)
    found = as_pipeline(pipe, "StableDiffusion3Img2ImgPipeline", "edit")
    assert type(found) is diffusers.StableDiffusion3Img2ImgPipeline and found.transformer is pipe.transformer
    assert found.scheduler is not pipe.scheduler
    for name, said in (("FluxImg2ImgPipeline", ""), ("NoPipeline", "no such"), ("AutoencoderKL", "no such")):
        if said:
            with pytest.raises(ConfigError, match=said):
                as_pipeline(pipe, name, "edit")
    with pytest.raises(ConfigError, match="for this role"):
        as_pipeline(pipe, "StableDiffusionPipeline", "edit")
