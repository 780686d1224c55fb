"""Arguments of a pipeline's call that a run decides itself, each with the key that replaces it."""

import re
from collections.abc import Mapping
from typing import Any

from gerl.config.schema import shown
from gerl.errors import ConfigError

# pattern of names -> what to do instead; the first that matches a whole name counts
REPLACED = {
    r"prompt(_\d+)?": "prompts are those of data.train and validation.data",
    r"(negative_)?(pooled_|generated_|source_|target_)?(prompt|image|ip_adapter_image)_embeds(?!_scale)\w*"
    r"|(negative_)?prompt_(attention_mask|cu_seqlens|reps)\w*"
    r"|(negative_)?((encoder_|text_)?attention_mask|encoder_hidden_states)": "the run encodes its prompts itself; "
    "sampling.call.negative_prompt sets the negative one",
    r"generator": "noise follows from trainer.seed",
    r"(\w+_)?latents": "noise follows from trainer.seed and sampling.same_init_noise, and pictures are columns of "
    "data.train",
    r"num_\w+_per_prompt|num_prompts_per_image": "set rollout.n, the images per prompt",
    r"output_type|return_dict|return_index": "the run reads the images as arrays; remove it",
    r"(\w+_)?callback\w*": "configurations hold no functions; change the pipeline in Python and pass it to gerl.train",
    r"eta": "set sampling.noise_level, with sampling.kernel=ddim",
}
SAMPLING = REPLACED | {r"height|width|num_inference_steps|guidance_scale": "set sampling.{name}"}
LEVELS = ("sigmas", "timesteps")  # lists that set the number of steps


def check_call(call: Mapping[str, Any], path: str, replaced: Mapping[str, str]) -> None:
    """Raise `ConfigError` for an argument in `call` that is `replaced` by a key; `path`: of the argument's key."""
    for name, value in call.items():
        remedy = next((text for names, text in replaced.items() if re.fullmatch(names, name)), None)
        if remedy is not None and value is not None:  # nulls are not passed
            remedy = remedy.format(name=name)
            raise ConfigError(f"{path}{name}={shown(value)}: a run decides this argument itself; {remedy}")


def check_levels(call: Mapping[str, Any], steps: int | None, key: str) -> None:
    """Raise `ConfigError` if a list of noise levels in `call` has another length than `steps`, the value of `key`."""
    for name in LEVELS:
        levels = call.get(name)
        if isinstance(levels, list | tuple) and steps not in (None, len(levels)):
            raise ConfigError(
                f"sampling.call.{name} has {len(levels)} values and {key}={steps}: there is a denoising step per "
                f"value; set {key}={len(levels)}"
            )


def idle_shift(call: Mapping[str, Any], scheduler: Mapping[str, Any]) -> str | None:
    """Return a warning if `call` shifts the noise levels of a `scheduler` whose configuration ignores it, else None."""
    if call.get("mu") is None or scheduler.get("use_dynamic_shifting"):
        return None
    return (
        f"sampling.call.mu={call['mu']} has no effect: the pipeline's scheduler has use_dynamic_shifting=false; "
        "remove it, or set shift in its scheduler_config.json"
    )


def scaled_lora(call: Mapping[str, Any]) -> str | None:
    """Return a warning if `call` scales the LoRA that is trained, else None."""
    for name, value in call.items():
        scale = value.get("scale") if isinstance(value, Mapping) else None
        if isinstance(scale, int | float) and scale != 1:
            return (
                f"sampling.call.{name}: scale={scale:g} also scales the LoRA that is trained, and is not part of its "
                f"file: sample with the same scale later, or remove it and set model.lora_alpha"
            )
    return None
