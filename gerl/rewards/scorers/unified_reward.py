"""UnifiedReward, a vision language model trained to grade generated images, behind an OpenAI-compatible endpoint.

Source: "Unified Reward Model for Multimodal Understanding and Generation" (arXiv 2503.05236); image size and scale are
those of Flow-GRPO's reward code.
"""

from dataclasses import dataclass
from typing import Annotated

from PIL import Image
from pydantic import Field

from gerl.rewards.scorers.base import Metadata
from gerl.rewards.scorers.chat import WHOLE_NUMBER, ChatScorer, Choice, fill, number_in
from gerl.rewards.scorers.http import Client, png_base64

FINAL_SCORE = rf"Final Score:\s*({WHOLE_NUMBER})"
BEST = 5.0
POINTWISE = (
    "Here are a text caption and an image that was generated from it. Judge the image by two criteria:\n"
    "1. Alignment with the caption: are the objects, their attributes and their relations as the caption says?\n"
    "2. Overall image quality: clarity, detail, colours and aesthetic appeal.\n"
    "Give a score from 1 to 5, written after 'Final Score:'.\n"
    "Text caption: [{prompt}]"
)


@dataclass(frozen=True, kw_only=True)
class UnifiedRewardScorer(ChatScorer):
    """The grade 1 to 5 behind the words Final Score, divided by 5.

    Images are sent as squares of `image_size` pixels. `template` may use {prompt} and the row's other columns: a
    checkpoint grades best when asked in the words it was trained with, which are on its model card.
    """

    model: str = "CodeGoat24/UnifiedReward-7b-v1.5"
    max_tokens: Annotated[int, Field(ge=1)] | None = 512
    template: str = POINTWISE
    image_size: Annotated[int, Field(ge=1)] = 512

    def __call__(self, images: list[Image.Image], prompts: list[str], metadata: list[Metadata]) -> list[float]:
        with self.client(self.base_url) as client:
            return client.map(
                lambda item: self._grade(client, *item), list(zip(images, prompts, metadata, strict=True))
            )

    def check_prompt(self, prompt: str, metadata: Metadata) -> None:
        fill(self.template, prompt, metadata)

    def _grade(self, client: Client, image: Image.Image, prompt: str, metadata: Metadata) -> float:
        square = image.convert("RGB").resize((self.image_size, self.image_size), Image.Resampling.BICUBIC)
        text = fill(self.template, prompt, metadata)
        return self.ask(client, prompt, text, [png_base64(square)], _read, max_tokens=self.max_tokens)


def _read(choice: Choice) -> float:
    return number_in(choice, FINAL_SCORE, (1.0, BEST)) / BEST
