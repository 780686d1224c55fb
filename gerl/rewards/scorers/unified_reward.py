"""UnifiedReward and its version 2, vision language models trained to grade images, behind OpenAI-compatible endpoints.

Source: "Unified Reward Model for Multimodal Understanding and Generation" (arXiv 2503.05236); image size and scale of
the first are those of Flow-GRPO's reward code, the answer of the second that of github.com/CodeGoat24/UnifiedReward
(inference_qwen/UnifiedReward-2.0-inference/point_score_ACS_image_generation.py, lines 28 to 59).
"""

from dataclasses import dataclass
from statistics import fmean
from typing import Annotated

from PIL import Image
from pydantic import Field

from gerl.rewards.scorers.base import Columns, Metadata
from gerl.rewards.scorers.chat import WHOLE_NUMBER, ChatScorer, Choice, fill, number_in
from gerl.rewards.scorers.http import Client, at_most, png_base64

FINAL_SCORE = rf"Final Score:\s*({WHOLE_NUMBER})"
BEST = 5.0
POINTWISE = (
    "Here are a text caption and an image that was generated from it. Judge the image by two criteria:\n"
    "1. Alignment with the caption: are the objects, their attributes and their relations as the caption says?\n"
    "2. Overall image quality: clarity, detail, colours and aesthetic appeal.\n"
    "Give a score from 1 to 5, written after 'Final Score:'.\n"
    "Text caption: [{prompt}]"
)

ASPECTS = ("alignment", "coherence", "style")
THREE_SCORES = (
    "Here are an image that was generated and the text caption it was generated from. Judge it three times, from 1 to "
    "5 each:\n"
    "- Alignment Score: does its content match the caption?\n"
    "- Coherence Score: does it hold together, without glitches, distorted objects and the like?\n"
    "- Style Score: how appealing does it look, whether or not it matches the caption?\n\n"
    "Answer in this form:\n\n"
    "Alignment Score (1-5): X\n"
    "Coherence Score (1-5): Y\n"
    "Style Score (1-5): Z\n\n"
    "Text Caption: [{prompt}]"
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


@dataclass(frozen=True, kw_only=True)
class UnifiedReward2(ChatScorer):
    """The mean of the grades 1 to 5 for alignment, coherence and style, divided by 5; each is a further column.

    Images are reduced to at most `image_size` pixels a side. `template` as for UnifiedReward. `model` is the name under
    which the endpoint serves it.
    """

    model: str = "CodeGoat24/UnifiedReward-2.0-qwen3vl-8b"
    max_tokens: Annotated[int, Field(ge=1)] | None = 512
    template: str = THREE_SCORES
    image_size: Annotated[int, Field(ge=1)] | None = 1024

    def __call__(self, images: list[Image.Image], prompts: list[str], metadata: list[Metadata]) -> Columns:
        with self.client(self.base_url) as client:
            rows = client.map(
                lambda item: self._grade(client, *item), list(zip(images, prompts, metadata, strict=True))
            )
        return {"mean": [fmean(row) for row in rows]} | {
            name: [row[i] for row in rows] for i, name in enumerate(ASPECTS)
        }

    def check_prompt(self, prompt: str, metadata: Metadata) -> None:
        fill(self.template, prompt, metadata)

    def _grade(self, client: Client, image: Image.Image, prompt: str, metadata: Metadata) -> list[float]:
        text = fill(self.template, prompt, metadata)
        picture = png_base64(at_most(image, self.image_size))
        return self.ask(client, prompt, text, [picture], _read_three, max_tokens=self.max_tokens)


def _read_three(choice: Choice) -> list[float]:
    return [
        number_in(choice, rf"{name.capitalize()} Score[^:\n]*:[\s*]*({WHOLE_NUMBER})", (1.0, BEST)) / BEST
        for name in ASPECTS
    ]
