"""Alignment of image and prompt by the base model of the run, without a reward model."""

from dataclasses import dataclass
from typing import Annotated, NoReturn

from PIL import Image
from pydantic import Field

from gerl.errors import DataError, RewardError
from gerl.protocol import Prompt
from gerl.rewards.scorers.base import Metadata, Scorer


@dataclass
class BaseAlignment(Scorer):
    """How much larger the base model's denoising error is under another prompt: log((other + 0.1) / (own + 0.1)).

    Workers compute it from the latents of the images they sample (`gerl.workers.base_judge`); the column `surprise` is
    log(own). draws: of the noise, per noise level.
    """

    draws: Annotated[int, Field(ge=1)] = 1

    on_worker = True
    differentiable = True

    def __call__(self, images: list[Image.Image], prompts: list[str], metadata: list[Metadata]) -> NoReturn:
        raise RewardError(
            "base_alignment needs the latents of sampled images, which image files do not have: compare checkpoints "
            "with python -m gerl.evaluate"
        )

    def check_prompts(self, prompts: list[Prompt]) -> None:
        if len({prompt.text for prompt in prompts}) == 1:
            raise DataError(
                f"base_alignment compares each prompt with another one, and all are {prompts[0].text!r}: add prompts, "
                "or use another scorer"
            )
