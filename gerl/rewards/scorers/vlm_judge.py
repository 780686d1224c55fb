"""Rewards from a vision language model behind an OpenAI-compatible endpoint: vLLM, SGLang, llama.cpp, a paid API.

Sources: numbers in a judge's text, "Judging LLM-as-a-Judge" (arXiv 2306.05685); the probability of "yes", VQAScore
(arXiv 2404.01291); a judge who sees the source of an edit, VIEScore (arXiv 2312.14867).
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean
from typing import Annotated, Literal

from PIL import Image
from pydantic import Field

from gerl.errors import RewardError
from gerl.rewards.scorers.base import Columns, Metadata, Reference, read, references_of
from gerl.rewards.scorers.chat import (
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
from gerl.rewards.scorers.http import Client, at_most, png_base64

DRAWN = 'The image was drawn for the description "{prompt}". '
EDITED = 'The last image was made from what is shown before it, by the instruction "{prompt}". '
RATE = (
    "Rate from {low} (not at all) to {high} (perfectly) how well it shows everything that is described. Answer with "
    'one line, "Score: " and the number.'
)
RATE_EDIT = (
    "Rate from {low} (not at all) to {high} (perfectly) how well the instruction is carried out and everything else "
    'left as it was. Answer with one line, "Score: " and the number.'
)
YES_NO = 'Does the image show "{prompt}"? Answer with one word, Yes or No.'
YES_NO_EDIT = "Is the instruction carried out, and everything else left as it was? Answer with one word, Yes or No."
RUBRIC = (
    "Rate each aspect of it from {low} (worst) to {high} (best):\n{aspects}\nAnswer with one JSON object that has the "
    "keys {keys} and numbers as values, and nothing else."
)
ASPECT = (
    '{question} Rate this aspect only, from {low} (worst) to {high} (best). Answer with one line, "Score: " and the '
    "number."
)
# by mode, and "aspect" where a rubric asks for one at a time: of a drawn image, of an edited one
TEMPLATES = {
    "regex": (DRAWN + RATE, EDITED + RATE_EDIT),
    "yes_no": (YES_NO, EDITED + YES_NO_EDIT),
    "rubric": (DRAWN + RUBRIC, EDITED + RUBRIC),
    "aspect": (DRAWN + ASPECT, EDITED + ASPECT),
}
NAME = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True, kw_only=True)
class VlmJudge(ChatScorer):
    """The verdict of a vision language model about image and prompt, in one of three `mode`s.

    regex: the number that `pattern` finds in the answer, divided by `scale`. yes_no: the probability of yes against no
    as the first word, in [0, 1], with `yes` and `no` the words that count. rubric: a number for each of `aspects`
    (name: question), divided by `scale`, as columns behind their mean, asked for in one request or, with `one_request`
    false, one by one. A number outside `limits` counts as no answer. Images are reduced to at most `image_size` pixels
    a side. `max_tokens` is by default 1 for yes_no, else 512.

    `sources` are columns of the row with pictures that are shown before the image, such as the one that was edited:
    a path (absolute, or from the current directory), a PIL image, or a list of them.

    `template` may use {prompt}, the row's other columns, {low} and {high} (the limits), and in a rubric {aspects} and
    {keys}, or {question} where aspects are asked for one by one.
    """

    mode: Literal["regex", "yes_no", "rubric"] = "regex"
    template: str | None = None
    sources: list[str] = field(default_factory=list)
    image_size: Annotated[int, Field(ge=1)] | None = 1024
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
        # The images of a group have the same sources: each is read once.
        shown = {key: self._picture(read(found)) for key, found in {_key(s): s for row in sources for s in row}.items()}
        with self.client(self.base_url) as client:

            def judge(item: tuple[Image.Image, list[Reference], str, Metadata]) -> dict[str, float]:
                image, before, prompt, row = item
                pictures = [*(shown[_key(source)] for source in before), self._picture(image)]
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
        return [found for name in self.sources for found in references_of("vlm_judge", prompt, metadata, name)]

    def _picture(self, image: Image.Image) -> str:
        return png_base64(at_most(image, self.image_size))

    @property
    def _template(self) -> str:
        kind = "aspect" if self.mode == "rubric" and not self.one_request else self.mode
        return TEMPLATES[kind][bool(self.sources)] if self.template is None else self.template

    def _text(self, prompt: str, metadata: Metadata, question: str) -> str:
        fields = {"low": f"{self.limits[0]:g}", "high": f"{self.limits[1]:g}"}
        if self.mode == "rubric":
            fields["question"] = question
            fields["aspects"] = "\n".join(f"- {name}: {text}" for name, text in self.aspects.items())
            fields["keys"] = ", ".join(f'"{name}"' for name in self.aspects)
        return fill(self._template, prompt, metadata, **fields)

    def _judge(self, client: Client, images: list[str], prompt: str, metadata: Metadata) -> dict[str, float]:
        """The score of an image, or that of each aspect."""

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
        found = last_object(text, list(self.aspects))
        if found is None:
            raise Unreadable(
                f"the answer {ending(text)} has no JSON object with the keys {', '.join(self.aspects)}: change the "
                "template"
            )
        return {name: within(found[name], self.limits, text) / self.scale for name in self.aspects}


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
