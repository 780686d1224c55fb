"""Columns of prompts that carry a known name, but that no pipeline is given."""

from collections.abc import Collection, Sequence

from gerl.config import Config
from gerl.protocol import Prompt
from gerl.utils.condition_images import COLUMNS

NEGATIVE = ("negative_prompt", "negative")
# Names of columns elsewhere, and what a run reads instead.
ELSEWHERE = {
    **dict.fromkeys(NEGATIVE, "sampling.call.negative_prompt applies to all prompts"),
    "seed": "noise is sampled from trainer.seed",
    "height": "sampling.height applies to all prompts",
    "width": "sampling.width applies to all prompts",
    "steps": "sampling.num_inference_steps applies to all prompts",
    "num_inference_steps": "sampling.num_inference_steps applies to all prompts",
    "guidance_scale": "sampling.guidance_scale applies to all prompts",
    "cfg": "sampling.guidance_scale applies to all prompts",
    "cfg_scale": "sampling.guidance_scale applies to all prompts",
    "mask": "data.columns={mask_image: mask} passes it",
    "source_image": "data.columns={image: source_image} passes it",
    "input_image": "data.columns={image: input_image} passes it",
    "init_image": "data.columns={image: init_image} passes it",
    "conditioning_image": "data.columns={control_image: conditioning_image} passes it",
}
PROMPTS = ("prompt", "caption", "captions", "description", "text")  # that a row may have beside its prompt
WRITTEN = "text"  # by these columns `ocr` knows what an image should say
FOR_ALL = "sampling.call.{} applies to all prompts"
PICTURE = "pictures are given in " + ", ".join(COLUMNS)


def unused_columns(prompts: Sequence[Prompt], config: Config, accepted: Collection[str]) -> list[str]:
    """A sentence about columns that look as if a pipeline with the `accepted` arguments were given them, if any."""
    there = {name for prompt in prompts for name, value in prompt.metadata.items() if value is not None}
    given = {name for name in COLUMNS if name in accepted}
    found = {name: why for name in sorted(there - given) if (why := _remedy(name, config, accepted))}
    if not found:
        return []
    parts = ", ".join(f"{name} ({why})" for name, why in found.items())
    return [f"prompt columns that are passed to scorers but not to the pipeline: {parts}"]


def _remedy(name: str, config: Config, accepted: Collection[str]) -> str:
    """The key or source that a run reads in place of the column `name`; "" for one that has no known name."""
    if name in COLUMNS or (name in NEGATIVE and NEGATIVE[0] not in accepted):
        return "the pipeline takes no such argument"
    if name in PROMPTS:
        known = name == WRITTEN and "ocr" in config.reward.scorers
        return "" if known else "the prompt column is set by data.prompt_key"
    if name in ELSEWHERE:
        return ELSEWHERE[name]
    if name not in accepted:
        return ""
    return PICTURE if "image" in name else FOR_ALL.format(name)
