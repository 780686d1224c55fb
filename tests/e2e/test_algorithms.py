"""Every algorithm, picked by name with its own settings, makes a reward rise, and fall when it is negated."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from gerl.commandline.composition import shipped
from gerl.trainer.main_flowgrpo import main

Train = Callable[..., Any]
# An easy task for random weights: a large LoRA and a high learning rate, scored by the brightness.
EASY = {
    "sampling__num_inference_steps": 5,
    "model__lora_alpha": 32,
    "actor__lr": 0.02,
    "actor__ema_decay": 0.5,
    "rollout__prompts_per_step": 3,
    "rollout__n": 12,
    "rollout__micro_batch_size": 36,
    "trainer__steps": 12,
    "validation__every": 0,
    "checkpoint__every": 0,
}
# what the published settings need to fit in five denoising steps, and to show in twelve trainer steps
FITTED: dict[str, dict[str, Any]] = {
    "flow_grpo_fast": {"sampling__window_size": 2, "sampling__window_range": "[0,4]"},
    "mix_grpo": {"sampling__window_size": 2, "sampling__window_every": 2},
    "mix_grpo_flash": {"sampling__window_size": 2, "sampling__window_every": 2},
    "tempflow_grpo": {"rollout__n": 2, "algorithm__branch_factor": 3},
    "branch_grpo": {
        "rollout__n": 2,
        "algorithm__split_steps": "[0,1,2]",
        "sampling__kernel": "flow_sde",
        "sampling__noise_level": 0.7,
    },
    "dgpo": {"sampling__window_range": "[0,4]"},
    "crd": {"algorithm__kl_coef": 0},
    # without bad examples a random model drifts towards whatever it draws, which the KL holds back
    "rwr": {
        "algorithm__beta": 3,
        "algorithm__kl_coef": 0.5,
        "rollout__n": 24,
        "rollout__micro_batch_size": 72,
        "trainer__steps": 14,
        "trainer__seed": 1,
    },
}


@pytest.mark.parametrize("name", [name for name in shipped("algorithm") if name != "ddpo"])  # that one is below
def test_the_reward_follows_its_sign(name: str, train: Train, workplace: Path, tmp_path: Path) -> None:
    keys = {**EASY, "validation__data": workplace / "val.txt", **FITTED.get(name, {})}
    change = {}
    for weight in (1, -1):
        run = train(tmp_path / str(weight), f"algorithm={name}", f"reward.scorers.bright.weight={weight}", **keys)
        bright = run.column("val/bright/mean")
        change[weight] = bright[-1] - bright[0]
        assert max(run.column("actor/ratio_deviation")) < 1e-5
    assert change[1] > 0.001 and change[-1] < -0.001, change


def test_ddpo_on_stable_diffusion(train: Train, workplace: Path, tmp_path: Path) -> None:
    pipe = tiny.sd15()
    pipe.unet.conv_out.weight.data.mul_(8)  # random weights predict next to nothing, and have nothing to learn with
    pipe.save_pretrained(tmp_path / "sd15")
    keys = {
        **EASY,
        "model__path": tmp_path / "sd15",
        "sampling__guidance_scale": 1.0,
        "sampling__call": "{output_type: np}",
        "validation__data": workplace / "val.txt",
        "rollout__prompts_per_step": 6,
        "rollout__n": 16,
        "rollout__micro_batch_size": 96,
        "trainer__steps": 16,
        "trainer__seed": 1,
        "actor__lr": 0.005,
    }
    change = {}
    for weight in (1, -1):
        run = train(tmp_path / str(weight), "algorithm=ddpo", f"reward.scorers.bright.weight={weight}", **keys)
        bright = run.column("val/bright/mean")
        change[weight] = bright[-1] - bright[0]
        assert max(run.column("actor/ratio_deviation")) < 1e-5
    assert change[1] > 0.001 and change[-1] < -0.001, change


def test_an_interrupted_run_carries_its_old_policies_on(train: Train, tmp_path: Path) -> None:
    keys = {
        "trainer__steps": 4,
        "checkpoint__every": 2,
        "checkpoint__keep": 9,
        "actor__lr": 0.01,
        "algorithm__old_decay": "[0,0.6,0,0.6]",
        "algorithm__rollout_decay": "[0,0.3,0.1,0.9]",
    }
    whole = train(tmp_path / "whole" / "run", "algorithm=diffusion_nft", **keys)
    half = tmp_path / "half" / "run"
    train(half, "algorithm=diffusion_nft", **keys | {"trainer__steps": 2})
    resumed = train(half, "algorithm=diffusion_nft", f"checkpoint.resume={half}", **keys)
    state, expected = resumed.state(4), whole.state(4)
    assert sorted(state) == sorted(expected)
    assert {name.split("/")[0] for name in state} == {"lora", "ema", "old", "sampler", "optimizer"}
    assert all(torch.equal(state[name], expected[name]) for name in state)
    kinds = {kind: [v for name, v in sorted(state.items()) if name.startswith(kind)] for kind in ("lora", "old", "sam")}
    for one, other in (("lora", "old"), ("lora", "sam"), ("old", "sam")):
        assert not all(torch.equal(a, b) for a, b in zip(kinds[one], kinds[other], strict=True))
    assert resumed.untimed() == whole.untimed()


DULL = """
import numpy as np

def compute_score(images, prompts, metadata):
    return [0.5 if len(p) < 6 else float(np.asarray(i).mean()) / 255 for i, p in zip(images, prompts)]
"""


def test_dynamic_sampling_draws_further_prompts_for_dull_groups(train: Train, workplace: Path, tmp_path: Path) -> None:
    (workplace / "dull.py").write_text(DULL)  # four of the six prompts always get the same reward
    keys = {"scorer": "dull.py", "trainer__steps": 3, "data__shuffle": "false", "rollout__n": 3}
    plain = train(tmp_path / "plain", **keys)
    dapo = train(tmp_path / "dapo", "algorithm.dynamic_sampling=2", **keys)
    assert plain.column("group/further_prompts") == []
    assert max(dapo.column("group/further_prompts")) >= 2
    assert len(plain.column("actor/grad_norm")) == len(dapo.column("actor/grad_norm")) == 3
    assert min(dapo.column("actor/grad_norm")) > 0 == min(plain.column("actor/grad_norm"))


def test_settings_that_hurt_are_warned_of_with_numbers(
    train: Train, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path / "run", "algorithm.clip_high=1e-9", trainer__steps=1, sampling__num_inference_steps=6)
    said = caplog.text
    noisy = "|log ratio| is at most 0.0e+00" not in said  # how a smaller batch rounds is up to the machine
    assert ("the clip range 1e-09 is below twice the numerical noise of the log-ratio" in said) == noisy
    assert "step 4 of the window, from sigma 0." in said and "flips the sign of the predicted noise (kappa -" in said


def test_the_kl_may_be_paid_by_the_reward(train: Train, tmp_path: Path) -> None:
    keys = {"trainer__steps": 3, "actor__lr": 0.02, "algorithm__kl_coef": 1e-3, "algorithm__kl_in_reward": "true"}
    run = train(tmp_path / "run", **keys)
    kl = run.column("reward/kl")
    assert kl[0] == 0 and kl[2] > 0  # the LoRA starts at the base model
    assert run.column("actor/kl") == [0, 0, 0]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("algorithm=flow_grpo", "sampling.kernel=flow_sde is for flow matching"),
        ("algorithm=diffusion_nft", "sampling.solver=dpm2 is for flow matching"),
    ],
)
def test_a_sampler_that_the_scheduler_cannot_use_is_refused_before_any_image(
    override: str, said: str, arguments: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.sd15().save_pretrained(tmp_path / "sd15")
    keys = {"model__path": tmp_path / "sd15", "sampling__call": "{output_type: np}"}
    assert main(arguments(tmp_path / "run", override, **keys)) == 1
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
