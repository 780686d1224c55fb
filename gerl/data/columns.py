"""Columns of prompts that carry a known name, but that no pipeline is given."""

from collections.abc import Collection, Sequence

from gerl.config import Config
from gerl.protocol import Prompt
from gerl.utils.condition_images import COLUMNS

NEGATIVE = ("negative_prompt", "negative")
# Names of columns elsewhere, and what a run reads instead.
ELSEWHERE = {
    **dict.fromkeys(NEGATIVE, "sampling.call.negative_prompt is for all prompts"),
    "seed": "noise is drawn from trainer.seed",
    "height": "sampling.height is for all prompts",
    "width": "sampling.width is for all prompts",
    "steps": "sampling.num_inference_steps is for all prompts",
    "num_inference_steps": "sampling.num_inference_steps is for all prompts",
    "guidance_scale": "sampling.guidance_scale is for all prompts",
    "cfg": "sampling.guidance_scale is for all prompts",
    "cfg_scale": "sampling.guidance_scale is for all prompts",
    "mask": "data.columns={mask_image: mask} gives it",
    "source_image": "data.columns={image: source_image} gives it",
    "input_image": "data.columns={image: input_image} gives it",
    "init_image": "data.columns={image: init_image} gives it",
    "conditioning_image": "data.columns={control_image: conditioning_image} gives it",
}
PROMPTS = ("prompt", "caption", "captions", "description", "text")  # that a row may have beside its prompt
WRITTEN = "text"  # by these columns `ocr` knows what an image should say
FOR_ALL = "sampling.call.{} is for all prompts"
PICTURE = "pictures are given in " + ", ".join(COLUMNS)


def unused_columns(prompts: Sequence[Prompt], config: Config, accepted: Collection[str]) -> list[str]:
    """A sentence about columns that look as if a pipeline with the `accepted` arguments were given them, if any."""
    there = {name for prompt in prompts for name, value in prompt.metadata.items() if value is not None}
    given = {name for name in COLUMNS if name in accepted}
    found = {name: why for name in sorted(there - given) if (why := _remedy(name, config, accepted))}
    if not found:
        return []
    parts = ", ".join(f"{name} ({why})" for name, why in found.items())
    return [f"columns of the prompts that the pipeline is not given, though scorers see them: {parts}"]


def _remedy(name: str, config: Config, accepted: Collection[str]) -> str:
    """The key or source that a run reads in place of the column `name`; "" for one that has no known name."""
    if name in COLUMNS or (name in NEGATIVE and NEGATIVE[0] not in accepted):
        return "the pipeline takes no such argument"
    if name in PROMPTS:
        known = name == WRITTEN and "ocr" in config.reward.scorers
        return "" if known else "the column of the prompts is named by data.prompt_key"
    if name in ELSEWHERE:
        return ELSEWHERE[name]
    if name not in accepted:
        return ""
    return PICTURE if "image" in name else FOR_ALL.format(name)
