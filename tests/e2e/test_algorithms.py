"""Every algorithm, picked by name with its own settings, makes a reward rise, and fall when it is negated.

Of the policy gradients, which have one loss, one is also run with the negated reward, as is one of those that
differentiate the reward.
"""

import functools
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import diffusers
import drills
import pytest
import tiny
import torch
from drills import more
from schedules import sd3_sigmas
from zoo import samplers

from gerl.commandline.composition import shipped

Train = Callable[..., Any]
# An easy task for random weights: a large LoRA and a high learning rate, scored by the brightness.
EASY = """
sampling.num_inference_steps=5 model.lora_alpha=32 actor.lr=0.02 actor.ema_decay=0.5 rollout.prompts_per_step=3
rollout.n=12 rollout.micro_batch_size=18 trainer.steps=6 validation.every=0 checkpoint.every=0
"""
# what the published settings need to fit in five denoising steps, and to show in few trainer steps
FITTED = {
    "flow_grpo_fast": "sampling.window_size=2 sampling.window_range=[0,4] rollout.n=24 rollout.micro_batch_size=24 "
    "actor.lr=0.03",
    "flow_dppo": "sampling.window_size=2 sampling.window_range=[0,4] trainer.steps=4",
    "mix_grpo": "sampling.window_size=2 sampling.window_every=2 trainer.steps=3",
    "mix_grpo_flash": "sampling.window_size=2 sampling.window_every=2 trainer.steps=3",
    "tempflow_grpo": "rollout.n=2 algorithm.branch_factor=3 rollout.micro_batch_size=12 trainer.steps=4",
    "branch_grpo": "rollout.n=2 algorithm.split_steps=[0,1,2] rollout.prompts_per_step=6 rollout.micro_batch_size=24",
    "few_step_grpo": "sampling.num_inference_steps=4 trainer.steps=5",
    "dmdr": "sampling.num_inference_steps=4 algorithm.matching_steps=4 trainer.steps=5",
    "neighbor_grpo": "trainer.steps=3",
    "tree_grpo": "rollout.n=2 algorithm.branch_factor=2 trainer.steps=4",
    "dense_grpo": "trainer.steps=5",
    "flow_ppo": "critic.warmup_steps=2",
    "fdfo": "sampling.noise_level=0.3 actor.lr=0.005 trainer.steps=4",
    # a prompt's past rewards say little after few visits, and a random UNet drifts with the noise of late steps
    "ddpo": "rollout.prompts_per_step=6 rollout.n=16 rollout.micro_batch_size=48 trainer.steps=6 actor.lr=0.01 "
    "sampling.same_init_noise=true algorithm.history=0 algorithm.timestep_weights=std2_over_jacobian",
    "dance_grpo": "rollout.prompts_per_step=6 rollout.n=16 rollout.micro_batch_size=32 trainer.steps=10",
    "grpo_guard": "rollout.prompts_per_step=6 rollout.micro_batch_size=36 trainer.steps=5",
    "dgpo": "rollout.micro_batch_size=36 sampling.window_range=[0,4] trainer.steps=5",
    "awm": "rollout.micro_batch_size=36 sampling.window_range=[1,4] trainer.steps=3",
    "awm_fast": "trainer.steps=3",
    "crd": "algorithm.kl_coef=0 trainer.steps=3",
    "diffusion_nft": "rollout.micro_batch_size=36 trainer.steps=3",
    "diffusion_dpo": "rollout.micro_batch_size=36 trainer.steps=4",
    "best_of_n": "rollout.micro_batch_size=36 trainer.steps=4",
    # without bad examples a random model drifts towards whatever it draws, which the KL holds back
    "rwr": "algorithm.beta=8 algorithm.kl_coef=0.5 rollout.n=24 rollout.micro_batch_size=72 trainer.steps=3 "
    "rollout.prompts_per_step=6 trainer.seed=1",
}
# they learn from teachers, whatever the reward: `tests/e2e/test_distillation.py`
TAUGHT = ("opd", "guidance_distillation")
ON_FILES = ("ddrl", "diffusion_dpo_offline", "kto", "sft")  # test_given.py has images for them
# those that differentiate the reward, whose scorer takes tensors
GRADIENTS = """
refl draft draft_lv alignprop drtune srpo leapalign flowbp_sparse flowbp_bridge flowbp_lagrange
""".split()
FEW = "rollout.prompts_per_step=6 rollout.micro_batch_size=6 rollout.n=1 trainer.steps=3 algorithm.decode_batch=6"
FITTED |= dict.fromkeys(GRADIENTS, FEW)
FITTED["srpo"] = f"{FEW} algorithm.positive=[bright] algorithm.negative=[dark] algorithm.margin=9"
FITTED["mixed_gradient"] = f"{FEW} rollout.n=4 rollout.micro_batch_size=24 algorithm.gradient_weight=10"
# on random weights it drifts with either sign, by what it draws: what the sign decides is the difference
DRIFTING = ("rwr",)
# the metrics of an update beside the loss, the optimizer step and, where it has a weight, the KL to the base model
RATIO = "ratio_deviation clip_fraction clip_fraction_low clip_fraction_high log_ratio_mean"
OFF_POLICY = "clip_fraction clip_range log_ratio_abs outside_fraction"  # of a step with several micro-batches
POLICY_GRADIENTS = """
flow_grpo flow_grpo_fast dance_grpo mix_grpo mix_grpo_flash ddpo grpo_guard flow_dppo tempflow_grpo branch_grpo
dense_grpo tree_grpo few_step_grpo dmdr flow_ppo
""".split()
MEASURED = dict.fromkeys(POLICY_GRADIENTS, RATIO) | {
    "dmdr": f"{RATIO} matching_distance fake_loss",
    "fdfo": RATIO,
    "neighbor_grpo": RATIO,
    "awm": "",  # its ratio is that to the weights themselves
    "awm_fast": "",
    "best_of_n": "squared_error",
    "rwr": "squared_error",
    "crd": "implicit_reward",
    "dgpo": "group_weight stopped_fraction",
    "diffusion_dpo": "preference_margin",
    "diffusion_nft": "old_distance",
}
OF_GRADIENTS = "tensor_reward without_gradient"
MEASURED |= dict.fromkeys(GRADIENTS, OF_GRADIENTS) | {"mixed_gradient": f"{RATIO} {OF_GRADIENTS} reward_loss"}
WITH_KL = ("awm", "dgpo", "diffusion_nft", "rwr")
EVERY_STEP = "loss grad_norm grad_rms lr lora_max nonfinite_updates policy_version"
ON_SD15 = {"sampling__call": "{max_sequence_length: null}"}


@pytest.fixture(scope="module")
def sd15(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pipe = tiny.sd15()
    pipe.unet.conv_out.weight.data.mul_(8)  # random weights predict next to nothing, and have nothing to learn with
    folder = tmp_path_factory.mktemp("model") / "sd15"
    pipe.save_pretrained(folder)
    return folder


TRAINED = [name for name in shipped("algorithm") if name not in (*TAUGHT, *ON_FILES)]


@pytest.mark.parametrize("name", [name for name in TRAINED if drills.sampled(name, drills.PRESETS)])
def test_the_reward_follows_its_sign(
    name: str, train: Train, assert_replayed: Callable[[Any], None], sd15: Path, workplace: Path, tmp_path: Path
) -> None:
    settings = [f"algorithm={name}", f"validation.data={workplace / 'val.txt'}", *EASY.split(), "trainer.dump=2"]
    settings += FITTED.get(name, "").split()
    keys: dict[str, Any] = ON_SD15 | {"model__path": sd15} if name in ("ddpo", "alignprop") else {}
    if name in (*GRADIENTS, "mixed_gradient"):
        keys["scorer"] = "bright_tensors.py"
    change = {}
    once = name not in ("flow_grpo", "draft") and name in (*POLICY_GRADIENTS, *GRADIENTS)
    for weight in (1,) if once else (1, -1):
        run = train(tmp_path / str(weight), *settings, f"reward.scorers.bright.weight={weight}", **keys)
        bright = run.column("val/bright/mean")
        change[weight] = bright[-1] - bright[0]
        assert run.column("val/reward/mean") == pytest.approx([weight * value for value in bright])
        expected = {*EVERY_STEP.split(), *MEASURED[name].split(), *(["kl"] if name in WITH_KL else [])}
        found = {key.removeprefix("actor/") for row in run.metrics[1:] for key in row if key.startswith("actor/")}
        if name in POLICY_GRADIENTS:  # of which all take several optimizer steps with the images of one rollout
            left_out = ("clip_range",) if name == "flow_dppo" else ()  # it has a threshold
            expected |= {f"off_policy/{key}" for key in OFF_POLICY.split() if key not in left_out}
        assert {key for key in found if not key.startswith(("step_grad_", "gradient_"))} == expected
        assert max(run.column("actor/ratio_deviation"), default=0.0) < 1e-5
    assert_replayed(run)
    if name in DRIFTING:
        assert change[1] - change[-1] > 0.002, change
    else:
        assert all(weight * value > 0.001 for weight, value in change.items()), change


@pytest.fixture(scope="module")
def few_steps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models of few steps: a latent consistency model, which draws new noise at each, and a flow map of videos."""
    folders = {name: tmp_path_factory.mktemp("model") / name for name in ("lcm", "flow_map")}
    lcm, flow_map = tiny.sd15(), samplers.any_flow()
    lcm.unet.conv_out.weight.data.mul_(8)
    flow_map.transformer.proj_out.weight.data.mul_(16)
    lcm.scheduler = diffusers.LCMScheduler()
    for name, pipe in (("lcm", lcm), ("flow_map", flow_map)):
        pipe.save_pretrained(folders[name])
    return folders


VARIANTS = {
    "cross_entropy": ("crd", "algorithm.kl_coef=0 algorithm.regression=cross_entropy trainer.steps=3"),
    "lcm": (
        "flow_grpo",  # noise drawn anew at each step hides what a step decides: more images, one update
        "sampling.kernel=cps sampling.noise_level=1 sampling.num_inference_steps=3 sampling.window_range=[0,2] "
        "actor.updates_per_step=1 rollout.n=24 rollout.micro_batch_size=72 trainer.steps=4",
    ),
    "flow_map": ("neighbor_grpo", "trainer.steps=5 rollout.n=6"),
}
CALLS = {"lcm": ON_SD15["sampling__call"], "flow_map": "{num_frames: 5, max_sequence_length: 16}"}


@drills.more
@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_follows_its_sign_too(
    name: str, train: Train, few_steps: dict[str, Path], workplace: Path, tmp_path: Path
) -> None:
    algorithm, fitted = VARIANTS[name]
    settings = [f"algorithm={algorithm}", f"validation.data={workplace / 'val.txt'}", *EASY.split(), *fitted.split()]
    keys = {"model__path": few_steps[name], "sampling__call": CALLS[name]} if name in CALLS else {}
    change = {}
    for weight in (1, -1):
        run = train(tmp_path / str(weight), *settings, f"reward.scorers.bright.weight={weight}", **keys)
        bright = run.column("val/bright/mean")
        change[weight] = bright[-1] - bright[0]
    assert change[1] > 0.001 and change[-1] < -0.001, change


@more
def test_a_differentiated_brightness_whitens_the_signs_in_a_few_steps(train: Train, tmp_path: Path) -> None:
    settings = """
    algorithm=draft model.path=signs model.lora_rank=16 model.lora_alpha=32 sampling.height=32 sampling.width=96
    sampling.num_inference_steps=3 rollout.n=1 rollout.prompts_per_step=3 actor.lr=0.01 trainer.steps=7
    """.split()
    run = train(tmp_path / "run", *settings, scorer="bright_tensors.py", sampling__call="{max_sequence_length: 1}")
    bright = run.column("reward/bright/mean")
    assert bright[0] < 0.55 and min(bright[-2:]) > 0.85, bright  # what a white board with its text has is about 0.9
    assert run.column("actor/tensor_reward") == pytest.approx(bright, abs=1e-3)


@more
def test_an_interrupted_run_carries_its_old_policies_on(train: Train, tmp_path: Path) -> None:
    settings = """
    algorithm=diffusion_nft algorithm.old_decay=[0,0.6,0,0.6] algorithm.rollout_decay=[0,0.3,0.1,0.9]
    checkpoint.every=2 checkpoint.keep=9 actor.lr=0.01
    """.split()
    whole = train(tmp_path / "whole" / "run", *settings, trainer__steps=4)
    half = tmp_path / "half" / "run"
    train(half, *settings, trainer__steps=2)
    resumed = train(half, *settings, f"checkpoint.resume={half}", trainer__steps=4)
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


@more
def test_dynamic_sampling_draws_further_prompts_for_dull_groups(train: Train, workplace: Path, tmp_path: Path) -> None:
    (workplace / "dull.py").write_text(DULL)  # four of the six prompts always get the same reward
    keys = {"scorer": "dull.py", "trainer__steps": 3, "data__shuffle": "false", "rollout__n": 3}
    plain = train(tmp_path / "plain", **keys)
    dapo = train(tmp_path / "dapo", "algorithm.dynamic_sampling=2", **keys)
    assert plain.column("group/further_prompts") == []
    assert max(dapo.column("group/further_prompts")) >= 2
    assert len(dapo.column("actor/grad_norm")) == 3 > len(plain.column("actor/grad_norm"))
    assert min(dapo.column("actor/grad_norm")) > 0


@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_a_clip_range_below_the_noise_of_the_log_ratio_is_warned_of(
    noise: float, train: Train, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = diffusers.SD3Transformer2DModel.forward

    @functools.wraps(forward)
    def depends_on_the_batch(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor]:
        (output,) = forward(self, hidden_states, *args, **kwargs)
        return (output * (1 + noise * len(hidden_states)),)  # rounding does the same, as it pleases the machine

    monkeypatch.setattr(diffusers.SD3Transformer2DModel, "forward", depends_on_the_batch)
    keys = {"algorithm__clip_dimensions": "null", "actor__check_gradient": "false"}  # which sees such a model too
    train(tmp_path / "run", trainer__steps=1, **keys)
    warned = [m for m in caplog.messages if re.search(r"clip range 0\.0001 .*algorithm\.clip_low.*model\.dtype", m)]
    assert len(warned) == (noise > 0)


def test_steps_that_flip_the_sign_of_the_predicted_noise_are_named(
    train: Train, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path / "run", trainer__steps=1, sampling__num_inference_steps=6)
    sigmas = sd3_sigmas(6)
    flipped = {}
    for k, (s, s2) in enumerate(pairwise(sigmas[1:-1]), start=1):  # the last step has no noise
        kappa = s2 - 0.7**2 * (s - s2) / (2 * (1 - s))  # Flow-SDE with noise level 0.7
        if kappa < 0:
            flipped[k] = rf"step {k} .*{s:.3f} .*{s2:.3f}.*kappa {kappa:.2f}.*sampling\.window_range"
    warned = [message for message in caplog.messages if "kappa" in message]
    assert list(flipped) == [4] and len(warned) == 1 and re.search(flipped[4], warned[0]), warned


def test_the_kl_may_be_paid_by_the_reward(train: Train, tmp_path: Path) -> None:
    keys = {"trainer__steps": 3, "actor__lr": 0.02, "algorithm__kl_coef": 1e-3, "algorithm__kl_in_reward": "true"}
    run = train(tmp_path / "run", **keys)
    kl = run.column("reward/kl")
    # the LoRA starts at the base model; rows that share a beginning are drawn in another batch than the KL is taken of
    assert kl[0] == pytest.approx(0, abs=1e-9) and kl[2] > 1e-6
    assert run.column("actor/kl") == []  # nothing of it is in the loss
