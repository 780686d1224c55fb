"""Schedulers without a transition kernel, and what takes their place."""

import copy
import itertools
import logging
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import pytest
import tiny
import torch
from newer import needs

from gerl.commandline.composition import compose_run, experiments
from gerl.config import Config, ModelConfig, SamplingConfig, algorithm_config
from gerl.engine import record, replay
from gerl.errors import ModelError
from gerl.model.schedulers import SameSigmas, distilled_warnings, few_steps, guidance_notes, trainable_scheduler
from gerl.workers.setup import load_worker_policy, model_facts

FLOW: dict[str, Any] = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
UniPC, DPM = diffusers.UniPCMultistepScheduler, diffusers.DPMSolverMultistepScheduler
FLOW_SCHEDULERS: dict[str, Any] = {
    "unipc": UniPC(**FLOW),  # Wan's
    "unipc dynamic": UniPC(**FLOW, use_dynamic_shifting=True),
    "unipc karras": UniPC(**FLOW, use_karras_sigmas=True),
    "dpm++": DPM(**FLOW),  # Sana's
    "dpm++ sigma_min": DPM(**FLOW, final_sigmas_type="sigma_min"),
}


def test_schedulers_with_a_kernel_stay() -> None:
    # Helios' schedule has stages, which its pipeline asks for by an argument of its own
    kept = [tiny.euler(shift=2.0), diffusers.DDIMScheduler(clip_sample=True), diffusers.HeliosScheduler()]
    # those of consistency models are trained at few noise levels, and at those only
    kept += [diffusers.LCMScheduler(), diffusers.SCMScheduler(), diffusers.FlowMatchLCMScheduler(shift=3.0)]
    kept += [diffusers.TCDScheduler(), diffusers.EDMEulerScheduler(), diffusers.FlowMapEulerDiscreteScheduler()]
    for scheduler in kept:
        assert trainable_scheduler(scheduler) is scheduler


# --- flow matching


@pytest.mark.parametrize("name", FLOW_SCHEDULERS)
@pytest.mark.parametrize("steps", [4, 50])
def test_euler_goes_along_the_same_sigmas_at_the_same_timesteps(name: str, steps: int) -> None:
    original = copy.deepcopy(FLOW_SCHEDULERS[name])
    euler = trainable_scheduler(FLOW_SCHEDULERS[name])
    options = {"mu": 1.15} if "dynamic" in name else {}
    for scheduler in (original, euler):
        scheduler.set_timesteps(steps, device="cpu", **options)
    assert isinstance(euler, diffusers.FlowMatchEulerDiscreteScheduler) and euler.order == 1
    assert torch.equal(euler.sigmas, original.sigmas) and torch.equal(euler.timesteps, original.timesteps.float())
    assert euler.num_inference_steps == steps and 1 >= euler.sigmas[0] > euler.sigmas[-1] >= 0
    x, v, s, s_next = torch.randn(2, 3), torch.randn(2, 3), *euler.sigmas[:2]
    moved = copy.deepcopy(euler).step(v, euler.timesteps[0], x).prev_sample
    torch.testing.assert_close(moved, x + (s_next - s) * v)


def test_heuns_two_evaluations_become_one_step() -> None:
    heun = diffusers.FlowMatchHeunDiscreteScheduler(shift=3.0)
    euler = trainable_scheduler(heun)
    stock = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    for scheduler in (heun, euler, stock):
        scheduler.set_timesteps(5)
    assert len(heun.timesteps) == 9 and len(euler.timesteps) == 5
    assert torch.equal(euler.sigmas, heun.sigmas.unique().flip(0)) and torch.equal(euler.sigmas, stock.sigmas)
    assert torch.equal(euler.timesteps, stock.timesteps)


@needs("diffusers", "0.37", "has other sigmas of UniPC")
def test_the_log_says_what_was_replaced_and_what_differs(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="gerl"):
        trainable_scheduler(UniPC(**FLOW))
        trainable_scheduler(diffusers.DEISMultistepScheduler(**FLOW))
        trainable_scheduler(FLOW_SCHEDULERS["unipc dynamic"])
    unipc, deis, dynamic = caplog.messages
    assert "UniPCMultistepScheduler by FlowMatchEulerDiscreteScheduler with the same sigmas" in unipc
    assert "shift 3; in 10 steps 1.000 0.964 0.923 0.875 0.818 0.750 0.667 0.563 0.430 0.252 0.000)" in unipc
    assert deis.endswith("0.250 0.000), except that the last step, which stayed at 0.250, goes to 0")
    assert dynamic.endswith("with the same sigmas (a dynamic shift)")


def test_given_sigmas_are_shifted_as_by_eulers() -> None:
    sigmas = [1.0, 0.75, 0.5, 0.25]
    stock = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    euler = trainable_scheduler(DPM(**FLOW))  # which itself takes none
    for scheduler in (stock, euler):
        scheduler.set_timesteps(4, sigmas=sigmas)
    assert torch.equal(euler.sigmas, stock.sigmas) and torch.equal(euler.timesteps, stock.timesteps)


def test_eulers_steps_in_the_place_of_another_solvers_are_taken_at_integer_timesteps_as_well() -> None:
    original, euler = UniPC(**FLOW), trainable_scheduler(UniPC(**FLOW))
    original.set_timesteps(4)
    euler.set_timesteps(4)
    x, v = torch.randn(2, 3), torch.randn(2, 3)
    expected = copy.deepcopy(euler).step(v, euler.timesteps[1], x).prev_sample
    for t in (original.timesteps[1], int(original.timesteps[1])):  # SkyReels V2 by diffusion forcing hands on such
        assert torch.equal(copy.deepcopy(euler).step(v, t, x, return_dict=False)[0], expected)
    with pytest.raises(IndexError):
        euler.step(v, 1, x)  # no timestep of the schedule, but the number of one


def test_what_pipelines_ask_other_solvers_for() -> None:
    original, euler = UniPC(**FLOW), trainable_scheduler(UniPC(**FLOW))
    x, noise = torch.randn(2, 2, 3), torch.randn(2, 2, 3)
    for scheduler in (original, euler):
        scheduler.set_timesteps(4)
        scheduler.set_begin_index(1)
    t = euler.timesteps[1:2]
    torch.testing.assert_close(euler.add_noise(x, noise, t), original.add_noise(x, noise, t))
    assert euler.scale_model_input(x, t) is x and euler.init_noise_sigma == 1.0
    assert euler.config.use_flow_sigmas and euler.config.shift == euler.config.flow_shift == 3.0


def test_a_rollout_without_noise_is_the_stock_pipeline_with_the_replaced_scheduler() -> None:
    case = tiny.CASES["wan"]
    pipe = tiny.build(case)
    pipe.scheduler = trainable_scheduler(UniPC(**FLOW))
    assert isinstance(pipe.scheduler, SameSigmas)
    call = tiny.call_for(case, guided=False)
    stock = pipe(**call, generator=tiny.generators())
    ours, tape = record(pipe, call, noise_level=0.0, generators=tiny.generators(), probe=False)
    assert torch.equal(tiny.output_of(ours), tiny.output_of(stock))
    assert [step.rule.sigma for step in tape.steps] == pytest.approx(pipe.scheduler.sigmas[:-1].tolist())


# --- the others


def test_ddim_keeps_what_the_replaced_scheduler_predicts_and_clips() -> None:
    euler = diffusers.EulerDiscreteScheduler(
        prediction_type="v_prediction", beta_end=0.015, timestep_spacing="trailing"
    )
    ddim = trainable_scheduler(euler)
    assert isinstance(ddim, diffusers.DDIMScheduler)
    assert ddim.config.prediction_type == "v_prediction" and ddim.config.timestep_spacing == "trailing"
    assert torch.equal(ddim.alphas_cumprod, euler.alphas_cumprod)
    assert trainable_scheduler(diffusers.DDPMScheduler(clip_sample=True)).config.clip_sample is True
    pndm = diffusers.PNDMScheduler(beta_schedule="scaled_linear")  # not DDIM's default
    assert torch.equal(trainable_scheduler(pndm).alphas_cumprod, pndm.alphas_cumprod)


@pytest.mark.parametrize("kind", [diffusers.EulerDiscreteScheduler, DPM, diffusers.DDPMScheduler])
def test_ddim_starts_at_pure_noise_where_the_replaced_scheduler_all_but_does(kind: Any) -> None:
    zero = kind(rescale_betas_zero_snr=True, prediction_type="v_prediction", timestep_spacing="trailing")
    ddim = trainable_scheduler(zero)
    assert ddim.config.rescale_betas_zero_snr and ddim.alphas_cumprod[-1] == 0 <= zero.alphas_cumprod[-1] < 1e-7
    ddim.set_timesteps(4)
    assert ddim.timesteps.tolist() == [999, 749, 499, 249]


@pytest.mark.parametrize("last", ["zero", "sigma_min"])
def test_dpm_of_edm_becomes_euler_along_the_same_sigmas(last: str, caplog: pytest.LogCaptureFixture) -> None:
    config = {"sigma_min": 0.01, "sigma_max": 50.0, "prediction_type": "v_prediction", "final_sigmas_type": last}
    dpm = diffusers.EDMDPMSolverMultistepScheduler(**config)
    with caplog.at_level(logging.INFO, logger="gerl"):
        euler = trainable_scheduler(dpm)
    assert type(euler) is diffusers.EDMEulerScheduler
    assert {name: euler.config[name] for name in config} == config
    for scheduler in (dpm, euler):
        scheduler.set_timesteps(7)
    torch.testing.assert_close(euler.sigmas, dpm.sigmas.float(), rtol=1e-5, atol=0)
    (message,) = caplog.messages
    assert message.startswith("replaced EDMDPMSolverMultistepScheduler by EDMEulerScheduler with the same sigmas")


@pytest.mark.parametrize("kind", [diffusers.CogVideoXDDIMScheduler, diffusers.CogVideoXDPMScheduler])
@pytest.mark.parametrize("one", [True, False])
def test_ddim_has_the_shifted_noise_levels_of_cogvideox(kind: Any, one: bool) -> None:
    options = {"prediction_type": "v_prediction", "timestep_spacing": "trailing", "rescale_betas_zero_snr": True}
    scheduler = kind(**options, snr_shift_scale=2.0, set_alpha_to_one=one)
    own = diffusers.CogVideoXDDIMScheduler.from_config(scheduler.config)
    ddim = trainable_scheduler(scheduler)
    for each in (ddim, own):
        each.set_timesteps(5)
    assert type(ddim) is diffusers.DDIMScheduler and torch.equal(ddim.timesteps, own.timesteps)
    x, v = 3 * torch.randn(2, 3), torch.randn(2, 3)  # so large that clipping would show
    for t in own.timesteps:
        torch.testing.assert_close(ddim.step(v, t, x).prev_sample, own.step(v, t, x).prev_sample, rtol=0, atol=1e-5)


def other_noise() -> Any:
    scheduler = diffusers.EulerDiscreteScheduler()
    scheduler.alphas_cumprod = scheduler.alphas_cumprod**2
    return scheduler


@pytest.mark.parametrize(
    ("scheduler", "message"),
    [
        (diffusers.CMStochasticIterativeScheduler, "scheduler CMStochasticIterativeScheduler has no transition kernel"),
        (
            partial(diffusers.FlowMatchLCMScheduler, scale_factors=[0.5, 1.0]),
            r"FlowMatchLCMScheduler enlarges the latents between steps \(scale_factors=\[0.5, 1.0\]\).*=None",
        ),
        (other_noise, "EulerDiscreteScheduler has another noise schedule than DDIM"),
        (
            partial(UniPC, prediction_type="flow_prediction"),
            r"UniPCMultistepScheduler has noise levels from 157\.4 to 0.*use_flow_sigmas",
        ),
        (
            partial(diffusers.DPMSolverMultistepInverseScheduler, use_karras_sigmas=True),
            "from images to noise.*DDIMSch",
        ),
        (partial(diffusers.DDIMInverseScheduler, timestep_spacing="leading"), "from images to noise.*DDIMScheduler"),
        (
            partial(diffusers.DDIMInverseScheduler, timestep_spacing="linspace"),
            r"DDIMInverseScheduler makes no schedule .*linspace is not supported.*DDIMScheduler\.from_config",
        ),
    ],
)
def test_schedulers_of_another_kind_are_refused(scheduler: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        trainable_scheduler(scheduler())


EPSILON = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
# a scheduler, and the distance of its images, with a LoRA of zeros, from those of its substitute in 10 steps
SPACINGS = {
    f"Euler {spacing} {more}": (diffusers.EulerDiscreteScheduler(**EPSILON, timestep_spacing=spacing, **more), 1e-5)
    for spacing in ("linspace", "leading", "trailing")
    for more in ({}, {"use_karras_sigmas": True}, {"prediction_type": "v_prediction", "steps_offset": 1})
} | {
    "first order": (diffusers.DPMSolverMultistepScheduler(**EPSILON, solver_order=1), 1e-5),
    "Karras": (diffusers.DPMSolverMultistepScheduler(**EPSILON, use_karras_sigmas=True), 0.06),
    "Heun": (diffusers.HeunDiscreteScheduler(**EPSILON), 0.06),
    "KDPM2": (diffusers.KDPM2DiscreteScheduler(**EPSILON), 0.06),
    "UniPC": (diffusers.UniPCMultistepScheduler(**EPSILON), 0.06),
    "DDIM": (diffusers.DDIMParallelScheduler(**EPSILON), 1e-5),
}


def test_the_steps_of_a_substitute_end_where_the_next_one_begins(caplog: pytest.LogCaptureFixture) -> None:
    pipe = tiny.sd15()
    pipe.set_progress_bar_config(disable=True)
    wrong = []
    for name, (scheduler, bound) in SPACINGS.items():
        for steps in (4, 10) if bound < 1e-3 else (10,):
            pipe.scheduler = scheduler
            call = {"prompt": ["a"], "height": 16, "width": 16, "num_inference_steps": steps, "output_type": "latent"}
            stock = pipe(**call, generator=tiny.generators()[:1]).images
            pipe.scheduler = trainable_scheduler(scheduler)
            _, tape = record(pipe, call, kernel="ode", noise_level=0.0, generators=tiny.generators()[:1], probe=False)
            own = pipe(**call, generator=tiny.generators()[:1]).images
            for found in (tape.steps[-1].x_next, own):
                far = float((found - stock).norm() / stock.norm())
                wrong += [f"{name} in {steps} steps: {far}"] if far > bound else []
            levels = [(step.rule.sigma, step.rule.sigma_next) for step in tape.steps]
            wrong += [
                f"{name} in {steps} steps: {a[1]} is followed by {b[0]}"
                for a, b in itertools.pairwise(levels)
                if abs(a[1] - b[0]) > 1e-6
            ]
    assert not wrong and not [
        record for record in caplog.records if record.name.startswith("gerl") and record.levelname == "WARNING"
    ]


def test_steps_with_noise_along_other_levels_are_replayed() -> None:
    pipe = tiny.sd15()
    tiny.add_lora(pipe)
    pipe.scheduler = trainable_scheduler(diffusers.EulerDiscreteScheduler(**EPSILON))
    call = {"prompt": ["a", "b"], "height": 16, "width": 16, "num_inference_steps": 4, "output_type": "latent"}
    _, tape = record(pipe, call, kernel="ddim", noise_level=1.0, generators=tiny.generators()[:2], probe=False)
    assert tape.stochastic_steps == [0, 1, 2]
    for step in tape.steps[:3]:  # eta 1: the posterior of the forward process between these levels
        a, b = 1 - step.rule.sigma**2, 1 - step.rule.sigma_next**2
        assert step.rule.std == pytest.approx(((1 - b) / (1 - a) * (1 - a / b)) ** 0.5, rel=1e-3)
    replay(pipe, tape, lambda k, s: torch.testing.assert_close(s.log_prob, s.recorded_log_prob), grad=False)


def test_other_timesteps_without_known_levels_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    trainable_scheduler(diffusers.PNDMScheduler(steps_offset=1, skip_prk_steps=True))
    assert not [record for record in caplog.records if record.name.startswith("gerl") and record.levelname == "WARNING"]
    trainable_scheduler(diffusers.PNDMScheduler())  # steps of a Runge-Kutta method first
    assert "in 10 steps" in caplog.text and "DDIMScheduler at" in caplog.text


EULER = "FlowMatchEulerDiscreteScheduler"
FEW = """
black-forest-labs/FLUX.1-schnell stabilityai/sd-turbo
stabilityai/stable-diffusion-3.5-large-turbo Tongyi-MAI/Z-Image-Turbo
ByteDance/SDXL-Lightning SimianLuo/LCM_Dreamshaper_v7 Efficient-Large-Model/Sana_Sprint_1.6B_1024px_diffusers
black-forest-labs/FLUX.2-klein-4B models/sdxl_4step folder/my-8-steps/ Lightricks/LTX-Video-0.9.8-13B-distilled
ByteDance/Hyper-SD owner/wan-dmd
""".split()
MANY = """
black-forest-labs/FLUX.1-dev black-forest-labs/FLUX.2-klein-base-4B stabilityai/stable-diffusion-xl-base-1.0 signs
turbo/sdxl nyanko7/flux-dev-de-distill my-18-steps hyperrealism hunyuan-guidance-distilled Wan-AI/Wan2.1-T2V-1.3B
""".split()


@pytest.mark.parametrize("path", FEW)
def test_a_name_says_few_steps(path: str) -> None:
    assert "its name has" in (few_steps(path, EULER) or "")


@pytest.mark.parametrize("path", MANY)
def test_a_name_says_nothing(path: str) -> None:
    assert few_steps(path, EULER) is None
    assert few_steps(path, "LCMScheduler") == "it comes with LCMScheduler"


@pytest.mark.parametrize(
    ("algorithm", "kernel", "expected"),
    [
        ("awm", "ode", "algorithm.name=awm trains on noised images.*few_step_grpo"),
        ("diffusion_dpo", "ode", "algorithm.name=diffusion_dpo"),
        ("flow_grpo", "flow_sde", "sampling.kernel=flow_sde.*use kernel=cps"),
        ("flow_grpo", "cps", None),
        ("neighbor_grpo", "ode", None),
        ("opd", "cps", None),
    ],
)
def test_what_harms_a_model_of_few_steps_is_warned_of(algorithm: str, kernel: Any, expected: str | None) -> None:
    more: dict[str, Any] = {"same_init_noise": True, "init_noise_spread": 0.3} if algorithm == "neighbor_grpo" else {}
    keys = {"sampling": SamplingConfig(kernel=kernel, **more), "algorithm": algorithm_config(algorithm)}
    few, many = (Config(model=ModelConfig(path=path), **keys) for path in ("a/x-turbo", "a/x"))
    found = distilled_warnings(few, EULER)
    assert distilled_warnings(many, EULER) == [] and len(found) == (expected is not None)
    if expected is not None:
        with pytest.raises(AssertionError, match=rf"a/x-turbo is a few-step model .*'turbo'.*{expected}"):
            raise AssertionError(found[0])


def test_no_recipe_is_warned_of() -> None:
    for name in experiments():
        assert distilled_warnings(compose_run([f"experiment={name}"]).config, EULER) == []


def test_a_loaded_model_tells_of_itself(tmp_path: Path) -> None:
    tiny.sd3().save_pretrained(tmp_path / "sd3-turbo")
    c = Config(model=ModelConfig(path=str(tmp_path / "sd3-turbo"), lora_rank=2), algorithm=algorithm_config("awm"))
    facts = model_facts(load_worker_policy(c, "cpu", None), c, ["a"])
    assert facts.notes == ["a"] and len(facts.warnings) == 1 and "sd3-turbo" in facts.warnings[0]
    assert guidance_notes({"sd3": tiny.sd3().transformer, "unknown": torch.nn.Linear(1, 1)}) == []
    (note,) = guidance_notes({"transformer": tiny.flux().transformer})
    assert note.startswith("transformer is guidance-distilled") and "algorithm.cfg" in note
