"""Call arguments that the run sets itself are refused, naming the key to use instead."""

import inspect
import re

import diffusers
import pytest

from gerl.config import Config, SamplingConfig, ValidationConfig
from gerl.config.algorithms import teachers
from gerl.config.call_arguments import idle_shift, scaled_lora
from gerl.errors import ConfigError, ModelError
from gerl.model.prompts import check_arguments

REMEDIES = {
    "prompt": "data.train", "prompt_2": "data.train", "prompt_embeds": "negative_prompt", "generator": "trainer.seed",
    "negative_pooled_prompt_embeds": "negative_prompt", "prompt_attention_mask": "negative_prompt",
    "latents": "trainer.seed", "image_latents": "data.train", "num_images_per_prompt": "rollout.n",
    "num_videos_per_prompt": "rollout.n", "output_type": "remove", "return_dict": "remove", "eta": "noise_level",
    "callback_on_step_end": "gerl.train", "height": "set sampling.height", "guidance_scale": "set sampling.guidance",
    "num_inference_steps": "set sampling.num_inference_steps",
}  # fmt: skip
KINDS = (
    diffusers.FluxPipeline, diffusers.StableDiffusion3Pipeline, diffusers.StableDiffusionXLPipeline,
    diffusers.StableDiffusionPipeline, diffusers.QwenImagePipeline, diffusers.WanPipeline,
    diffusers.PixArtSigmaPipeline, diffusers.StableDiffusionInpaintPipeline, diffusers.LTXPipeline,
    diffusers.HiDreamImagePipeline,
)  # fmt: skip


def refusal(name: str, value: object = 2) -> str:
    with pytest.raises(ConfigError) as raised:
        SamplingConfig(call={name: value})
    return str(raised.value)


def test_what_a_run_decides_names_the_key_that_replaces_it() -> None:
    wrong = {name: text for name, key in REMEDIES.items() if key not in (text := refusal(name)) or name not in text}
    assert not wrong
    SamplingConfig(call=dict.fromkeys(REMEDIES))  # nulls are not passed


def test_of_real_pipelines_all_such_arguments_are_refused_and_no_other() -> None:
    """By what the words of a name say, not by the table."""
    names = {name for kind in KINDS for name in inspect.signature(kind.__call__).parameters} - {"self", "kwargs"}
    taken = {name for name in names if re.search(r"embeds|latents|callback|per_prompt|prompt_attention_mask", name)}
    taken |= names & {"prompt", "prompt_2", "prompt_3", "prompt_4", "generator", "output_type", "return_dict", "eta"}
    taken |= names & {"height", "width", "num_inference_steps", "guidance_scale"}
    accepted = []
    for name in names - {"sigmas", "timesteps"}:
        try:
            SamplingConfig(call={name: 2})
            accepted.append(name)
        except ConfigError:
            pass
    assert set(accepted) == names - {"sigmas", "timesteps"} - taken
    assert {"max_sequence_length", "negative_prompt", "clip_skip", "true_cfg_scale", "num_frames"} <= set(accepted)


def test_a_teacher_may_guide_otherwise_but_not_take_other_prompts() -> None:
    assert teachers([{"call": {"true_cfg_scale": 4.0}}])
    with pytest.raises(ConfigError, match=r"algorithm\.teachers: call\.prompt='z'"):
        teachers([{"call": {"prompt": "z"}}])


def test_a_list_of_noise_levels_has_one_per_step() -> None:
    levels = {"sigmas": [1.0, 0.9, 0.5]}
    with pytest.raises(ConfigError, match=r"set sampling\.num_inference_steps=3"):
        SamplingConfig(num_inference_steps=4, call=levels)
    sampling = SamplingConfig(num_inference_steps=3, call=levels)
    with pytest.raises(ConfigError, match=r"set validation\.num_inference_steps=3"):
        Config(sampling=sampling, validation=ValidationConfig(num_inference_steps=5))
    with pytest.raises(ConfigError, match=r"sampling\.sigmas=linear"):
        SamplingConfig(num_inference_steps=3, sigmas="linear", call=levels)


def test_a_misspelt_argument_is_answered_with_the_pipelines_own() -> None:
    with pytest.raises(ModelError, match="'max_sequnce_length', did you mean 'max_sequence_length'"):
        check_arguments(diffusers.FluxPipeline, SamplingConfig(call={"max_sequnce_length": 8}))


def test_a_scale_of_the_trained_lora_is_said() -> None:
    assert scaled_lora({"joint_attention_kwargs": {"scale": 1.0}, "strength": 0.5}) is None
    sentence = scaled_lora({"cross_attention_kwargs": {"scale": 0.5}}) or ""
    assert "sampling.call.cross_attention_kwargs: scale=0.5" in sentence and "model.lora_alpha" in sentence


def test_a_shift_that_the_scheduler_ignores_is_said() -> None:
    assert idle_shift({}, {}) is None and idle_shift({"mu": 0.5}, {"use_dynamic_shifting": True}) is None
    assert "sampling.call.mu=0.5" in (idle_shift({"mu": 0.5}, {"use_dynamic_shifting": False}) or "")
