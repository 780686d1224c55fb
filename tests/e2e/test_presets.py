"""Every preset as it is, in ten denoising steps: it learns off policy too, and no two are the same algorithm."""

from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import drills
import pytest
import torch

from gerl.commandline.composition import compose_run, shipped
from gerl.config.algorithms import algorithm_config
from gerl.config.registry import ALGORITHMS

# a large learning rate, so that a trust region has something to hold back
SETTINGS = """
sampling.num_inference_steps=10 model.lora_alpha=32 actor.lr=0.04 rollout.prompts_per_step=3
trainer.steps=1 checkpoint.every=0 reward.scorers.bright.weight=1
""".split()
FITTED = {
    # the published noise levels, from the second to before 0.9 of them, in ten steps rather than fourteen
    "awm": ["sampling.window_range=[1,9]"],
    "branch_grpo": ["rollout.prompts_per_step=6"],  # of three trees too few images differ
}
IMAGES = {"branch_grpo": 1, "tree_grpo": 1, "tempflow_grpo": 1}  # of a tree: images a prompt; elsewhere 4
ON_FILES = ("ddrl", "diffusion_dpo_offline", "kto", "sft")  # test_given.py has images for them
OTHER_PIPELINES = ("ddpo",)  # its kernel is that of Stable Diffusion 1.x
PRESETS = [
    name
    for name in shipped("algorithm")
    # those that differentiate the reward are compared with loops written by hand, see test_reward_gradient.py
    if drills.sampled(name, (*drills.PRESETS, "flow_dppo"))
    and name not in (*OTHER_PIPELINES, *ON_FILES)
    and not (name in ALGORITHMS and algorithm_config(name).needs.reward_gradient)
]


@pytest.fixture(scope="module")
def runs(train: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """The run of one trainer step of a preset, made once."""
    made: dict[tuple[str, ...], Any] = {}

    def run(name: str, *overrides: str) -> Any:
        if (name, *overrides) not in made:
            settings = [
                f"algorithm={name}",
                *SETTINGS,
                f"rollout.n={IMAGES.get(name, 4)}",
                f"rollout.micro_batch_size={3 if compose_run([f'algorithm={name}']).config.actor.updates > 2 else 6}",
                *FITTED.get(name, []),
                *overrides,
            ]
            made[name, *overrides] = train(tmp_path_factory.mktemp(name), *settings)
        return made[name, *overrides]

    return run


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_with_a_trust_region_or_an_old_policy_takes_a_step_off_policy(name: str, runs: Any) -> None:
    run, config = runs(name), compose_run([f"algorithm={name}"]).config
    updates = config.actor.updates_per_step
    assert run.column("actor/policy_version")[-1] == updates
    algorithm = config.algorithm
    if algorithm.needs.ratio:
        assert updates > 1
        assert run.column("actor/off_policy/log_ratio_abs")[-1] > 0
        assert run.column("actor/off_policy/outside_fraction")[-1] > 0
    elif "clip_low" in vars(algorithm) and updates > 1:
        assert run.column("actor/log_ratio_mean")[-1] != 0


def test_no_two_presets_are_the_same_algorithm(runs: Any) -> None:
    loras = {name: runs(name).lora(1) for name in PRESETS}
    for one, other in combinations(PRESETS, 2):
        assert not torch.allclose(loras[one], loras[other], rtol=1e-3, atol=1e-6), f"{one} is {other}"


def test_a_mask_by_divergence_is_no_clip_by_ratio(runs: Any) -> None:
    settings = ["sampling.window_size=null", "sampling.window_range=null", "trainer.steps=2"]
    masked, clipped = runs("flow_dppo", *settings), runs("flow_grpo", *settings)
    assert masked.metrics[1]["actor/off_policy/clip_fraction"] != clipped.metrics[1]["actor/off_policy/clip_fraction"]
    assert not torch.allclose(masked.lora(2), clipped.lora(2), rtol=1e-3, atol=1e-6)


def test_presets_are_the_same_on_the_same_seed(runs: Any, train: Callable[..., Any], tmp_path: Path) -> None:
    settings = ["algorithm=flow_dppo", *SETTINGS, "rollout.n=4", "rollout.micro_batch_size=6"]
    assert torch.equal(train(tmp_path / "again", *settings).lora(1), runs("flow_dppo").lora(1))
