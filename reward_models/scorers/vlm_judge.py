"""Scores by a vision language model behind an OpenAI-compatible endpoint: any judge, and UnifiedReward.

Sources of the judge: numbers in its text, "Judging LLM-as-a-Judge" (arXiv 2306.05685); the probability of "yes",
VQAScore (arXiv 2404.01291); the source of an edit as an input, VIEScore (arXiv 2312.14867).
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Annotated, Literal

import yaml
from PIL import Image
from pydantic import Field

from gerl.errors import RewardError
from gerl.rewards.scorers.base import Columns, Metadata, Reference, read, references_of
from reward_models.scorers.chat import (
    WHOLE_NUMBER,
    Answer,
    ChatScorer,
    Choice,
    Unreadable,
    bare,
    ending,
    fill,
    last_object,
    number_in,
    probability_of_yes,
    text_of,
    within,
)
from reward_models.scorers.http import Client, png_base64

TEMPLATES = yaml.safe_load(Path(__file__).with_name("templates.yaml").read_text())
NAME = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True, kw_only=True)
class VlmJudge(ChatScorer):
    """Score of image and prompt by a vision language model, in one of three `mode`s.

    regex: the number that `pattern` finds in the answer, divided by `scale`. yes_no: the probability of yes against no
    as the first word, in [0, 1]; `yes` and `no` are the words that count. rubric: a number for each of `aspects` (name:
    question), divided by `scale`, as columns after their mean, in one request or, with `one_request` false, in one
    request per aspect. A number outside `limits` counts as no answer. Images are downscaled to at most `image_size`
    pixels a side. `max_tokens` defaults to 1 for yes_no, else 512.

    `sources` are columns of the row with images shown before the scored image, such as the source of an edit: a path
    (absolute, or relative to the current directory), a PIL image, or a list of them.

    `template` may use {prompt}, the row's other columns, {low} and {high} (the limits), and in a rubric {aspects} and
    {keys}, or {question} if each aspect is a request.
    """

    mode: Literal["regex", "yes_no", "rubric"] = "regex"
    template: str | None = None
    sources: list[str] = field(default_factory=list)
    pattern: str = rf"[Ss]core:[\s*_]*(-?{WHOLE_NUMBER})"
    scale: Annotated[float, Field(gt=0)] = 10.0
    limits: tuple[float, float] = (0.0, 10.0)
    yes: list[str] = field(default_factory=lambda: ["yes"])
    no: list[str] = field(default_factory=lambda: ["no"])
    min_mass: Annotated[float, Field(gt=0, le=1)] = 0.01
    aspects: dict[str, str] = field(default_factory=dict)
    one_request: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_pattern(self.pattern)
        if not self.limits[0] < self.limits[1]:
            raise RewardError(f"limits={list(self.limits)}: expected the lowest and the highest number of an answer")
        if (self.mode == "rubric") != bool(self.aspects):
            raise RewardError(
                f"mode={self.mode} has {len(self.aspects)} aspects: a rubric needs them, and no other mode takes them"
            )
        for name in self.aspects:
            if NAME.fullmatch(name) is None or name == "mean":
                raise RewardError(f"aspects.{name}: use a name of letters, digits, _ and -, other than mean")
        both = {bare(word) for word in self.yes} & {bare(word) for word in self.no}
        if both or not all(map(bare, [*self.yes, *self.no])) or not (self.yes and self.no):
            raise RewardError(f"yes={self.yes} and no={self.no}: expected words of letters for each, and none for both")
        place = None if self.mode != "rubric" else "{aspects}" if self.one_request else "{question}"
        if place is not None and place not in self._template:
            raise RewardError(f"template has no {place}, so the judge would not know what to rate: add it")

    def __call__(
        self, images: list[Image.Image], prompts: list[str], metadata: list[Metadata]
    ) -> list[float] | Columns:
        sources = [self._sources(prompt, row) for prompt, row in zip(prompts, metadata, strict=True)]
        # the images of a group have the same sources: read each once
        shown = {key: self.png(read(origin)) for key, origin in {_key(s): s for row in sources for s in row}.items()}
        with self.client(self.base_url) as client:

            def judge(item: tuple[Image.Image, list[Reference], str, Metadata]) -> dict[str, float]:
                image, before, prompt, row = item
                pictures = [*(shown[_key(source)] for source in before), self.png(image)]
                return self._judge(client, pictures, prompt, row)

            rows = client.map(judge, zip(images, sources, prompts, metadata, strict=True))
        if self.mode != "rubric":
            return [row["score"] for row in rows]
        return {"mean": [fmean(row.values()) for row in rows]} | {
            name: [row[name] for row in rows] for name in self.aspects
        }

    def check_prompt(self, prompt: str, metadata: Metadata) -> None:
        self._text(prompt, metadata, "")
        self._sources(prompt, metadata)

    def _sources(self, prompt: str, metadata: Metadata) -> list[Reference]:
        return [reference for name in self.sources for reference in references_of("vlm_judge", prompt, metadata, name)]

    @property
    def _template(self) -> str:
        if self.template is not None:
            return self.template
        kind = "aspect" if self.mode == "rubric" and not self.one_request else self.mode
        template: str = TEMPLATES["vlm_judge"][kind]["edited" if self.sources else "drawn"]
        return template

    def _text(self, prompt: str, metadata: Metadata, question: str) -> str:
        fields = {"low": f"{self.limits[0]:g}", "high": f"{self.limits[1]:g}"}
        if self.mode == "rubric":
            fields["question"] = question
            fields["aspects"] = "\n".join(f"- {name}: {text}" for name, text in self.aspects.items())
            fields["keys"] = ", ".join(f'"{name}"' for name in self.aspects)
        return fill(self._template, prompt, metadata, **fields)

    def _judge(self, client: Client, images: list[str], prompt: str, metadata: Metadata) -> dict[str, float]:
        """Return the score of an image, or of each aspect."""

        def ask(reader: Callable[[Choice], Answer], question: str = "", tokens: int = 512, **body: object) -> Answer:
            text = self._text(prompt, metadata, question)
            return self.ask(client, prompt, text, images, reader, max_tokens=self.max_tokens or tokens, **body)

        match self.mode:
            case "regex":
                return {"score": ask(self._read_number)}
            case "yes_no":
                return {"score": ask(self._read_yes_no, tokens=1, logprobs=True, top_logprobs=20)}
            case "rubric" if self.one_request:
                return ask(self._read_rubric)
            case "rubric":
                return {name: ask(self._read_number, question) for name, question in self.aspects.items()}

    def _read_number(self, choice: Choice) -> float:
        return number_in(choice, self.pattern, self.limits) / self.scale

    def _read_yes_no(self, choice: Choice) -> float:
        return probability_of_yes(choice, self.yes, self.no, self.min_mass)

    def _read_rubric(self, choice: Choice) -> dict[str, float]:
        text = text_of(choice)
        values = last_object(text, list(self.aspects))
        if values is None:
            raise Unreadable(
                f"the answer {ending(text)} has no JSON object with the keys {', '.join(self.aspects)}: change the "
                "template"
            )
        return {name: within(values[name], self.limits, text) / self.scale for name in self.aspects}


def check_pattern(pattern: str) -> None:
    """Raise `RewardError` unless `pattern` is a regular expression with a group for the number."""
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        raise RewardError(f"pattern={pattern!r} is not a valid regular expression ({error}): correct it") from None
    if groups < 1:
        raise RewardError(f"pattern={pattern!r} has no group: put parentheses around the number")


def _key(source: Reference) -> str | int:
    return id(source) if isinstance(source, Image.Image) else str(source)


# --- UnifiedReward and its version 2, vision language models trained to score images
#
# Source: "Unified Reward Model for Multimodal Understanding and Generation" (arXiv 2503.05236); image size and scale of
# the first are from Flow-GRPO's reward code, the answer format of the second from github.com/CodeGoat24/UnifiedReward
# (inference_qwen/UnifiedReward-2.0-inference/point_score_ACS_image_generation.py, lines 28 to 59).

FINAL_SCORE = rf"Final Score:\s*({WHOLE_NUMBER})"
BEST = 5.0
ASPECTS = ("alignment", "coherence", "style")


@dataclass(frozen=True, kw_only=True)
class UnifiedReward(ChatScorer):
    """Base class of both versions.

    `template` may use {prompt} and the row's other columns: a checkpoint scores best with the wording it was trained
    with, which is on its model card. `model` is the name under which the endpoint serves it.
    """

    max_tokens: Annotated[int, Field(ge=1)] | None = 512
    template: str

    def grades(
        self, images: list[Image.Image], prompts: list[str], metadata: list[Metadata], read: Callable[[Choice], Answer]
    ) -> list[Answer]:
        """Return the value that `read` extracts from the answer for each image."""
        with self.client(self.base_url) as client:

            def grade(item: tuple[Image.Image, str, Metadata]) -> Answer:
                image, prompt, row = item
                text = fill(self.template, prompt, row)
                return self.ask(client, prompt, text, [self.png(image)], read, max_tokens=self.max_tokens)

            return client.map(grade, zip(images, prompts, metadata, strict=True))

    def check_prompt(self, prompt: str, metadata: Metadata) -> None:
        fill(self.template, prompt, metadata)


@dataclass(frozen=True, kw_only=True)
class UnifiedReward1(UnifiedReward):
    """Score from 1 to 5 after the words Final Score, divided by 5; images are sent as squares of `image_size`."""

    model: str = "CodeGoat24/UnifiedReward-7b-v1.5"
    template: str = TEMPLATES["unified_reward"]
    image_size: Annotated[int, Field(ge=1)] = 512

    def __call__(self, images: list[Image.Image], prompts: list[str], metadata: list[Metadata]) -> list[float]:
        def grade(choice: Choice) -> float:
            return number_in(choice, FINAL_SCORE, (1.0, BEST)) / BEST

        return self.grades(images, prompts, metadata, grade)

    def png(self, image: Image.Image) -> str:
        return png_base64(image.convert("RGB").resize((self.image_size, self.image_size), Image.Resampling.BICUBIC))


@dataclass(frozen=True, kw_only=True)
class UnifiedReward2(UnifiedReward):
    """Mean of the scores from 1 to 5 for alignment, coherence and style, divided by 5; each is a further column."""

    model: str = "CodeGoat24/UnifiedReward-2.0-qwen3vl-8b"
    template: str = TEMPLATES["unified_reward2"]

    def __call__(self, images: list[Image.Image], prompts: list[str], metadata: list[Metadata]) -> Columns:
        def three(choice: Choice) -> list[float]:
            patterns = [rf"{name.capitalize()} Score[^:\n]*:[\s*]*({WHOLE_NUMBER})" for name in ASPECTS]
            return [number_in(choice, pattern, (1.0, BEST)) / BEST for pattern in patterns]

        rows = self.grades(images, prompts, metadata, three)
        columns = {name: [row[i] for row in rows] for i, name in enumerate(ASPECTS)}
        return {"mean": [fmean(row) for row in rows], **columns}
