"""Rewards from a vision language model behind an OpenAI-compatible endpoint: vLLM, SGLang, llama.cpp, a paid API.

Sources: numbers in a judge's text, "Judging LLM-as-a-Judge" (arXiv 2306.05685); the probability of "yes", VQAScore
(arXiv 2404.01291).
"""

import json
import logging
import math
import re
import string
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean
from typing import Annotated, Literal, TypeVar

from PIL import Image
from pydantic import Field

from gerl.errors import DataError, RewardError
from gerl.rewards.scorers.base import JSON, Columns, Metadata, number_of
from gerl.rewards.scorers.http import Client, HttpScorer, at_most, check_url, png_base64

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")
Choice = dict[str, JSON]  # of a chat completion

RATE = (
    'The image was drawn for the description "{prompt}". Rate from {low} (not at all) to {high} (perfectly) how well '
    'it shows everything that is described. Answer with one line, "Score: " and the number.'
)
YES_NO = 'Does the image show "{prompt}"? Answer with one word, Yes or No.'
RUBRIC = (
    'The image was drawn for the description "{prompt}". Rate each aspect of it from {low} (worst) to {high} (best):\n'
    "{aspects}\nAnswer with one JSON object that has the keys {keys} and numbers as values, and nothing else."
)
ASPECT = (
    'The image was drawn for the description "{prompt}". {question} Rate this aspect only, from {low} (worst) to '
    '{high} (best). Answer with one line, "Score: " and the number.'
)
NAME = re.compile(r"[A-Za-z0-9_-]+")
PLACE = re.compile(r"\{(\w+)\}")
# To its end: the beginning of 1e999, 7,5 or 1,000 is another number.
WHOLE_NUMBER = r"(?>\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)(?![.,]?\d)"
READ = 10**5  # characters at the end of an answer that are searched for a JSON object


class Unreadable(RewardError):
    """A judge answered, but not with what was asked for."""


@dataclass(frozen=True, kw_only=True)
class ChatScorer(HttpScorer):
    """Asks `model` at the chat completions of `base_url` (such as http://127.0.0.1:8000/v1), at temperature 0.

    `extra_body` are further fields of each request, such as {chat_template_kwargs: {enable_thinking: false}}; they
    replace gerl's own, and null removes one. An answer that cannot be read is asked for `answer_retries` times again.
    """

    base_url: str
    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    extra_body: dict[str, object] = field(default_factory=dict)
    answer_retries: Annotated[int, Field(ge=0)] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_url("base_url", self.base_url)

    def ask(
        self, client: Client, prompt: str, text: str, image: str, read: Callable[[Choice], Answer], **body: object
    ) -> Answer:
        """The value that `read` finds in the model's answer to `text` about `image` (PNG in base64).

        `prompt` is what the image was drawn for, for messages; `body` are further fields of the request.

        Raises:
            RewardError: the request failed, or no answer could be read.
        """
        content = [
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}},
            {"type": "text", "text": text},
        ]
        messages = [{"role": "user", "content": content}]
        fields = {"model": self.model, "messages": messages, "temperature": 0, **body, **self.extra_body}
        payload = {name: value for name, value in fields.items() if value is not None}
        for attempt in range(self.answer_retries + 1):
            choice = first_choice(client, client.post("/chat/completions", payload))
            try:
                return read(choice)
            except Unreadable as error:
                message = client.redacted(f"{self.model} at {client.url}, about {prompt!r}: {error}")
                log.warning("%s (attempt %d of %d)", message, attempt + 1, self.answer_retries + 1)
        raise RewardError(f"{message} ({self.answer_retries + 1} attempts)")


def first_choice(client: Client, completion: JSON) -> Choice:
    """The first choice of a chat completion; raises `RewardError` if it is not one."""
    match completion:
        case {"choices": [dict() as choice, *_]} if isinstance(choice.get("message"), dict):
            return choice
    raise RewardError(
        f"{client.url} answered with something other than a chat completion, {client.quoted(completion)}: "
        "give the address of an OpenAI-compatible endpoint, which mostly ends in /v1"
    )


def number_in(choice: Choice, pattern: str, limits: tuple[float, float]) -> float:
    """The number in the first group of the last match of `pattern` in the answer's text.

    The last, because a judge that reasons names numbers on its way. Raises `Unreadable` if there is no match, or the
    number is outside `limits`.
    """
    text = text_of(choice)
    found = [match.group(1) for match in re.finditer(pattern, text)]
    if not found:
        raise Unreadable(f"the answer {_end(text)} has no match of {pattern!r}{_cut_off(choice)}: change the template")
    return within(found[-1], limits, text)


def within(value: JSON, limits: tuple[float, float], text: str) -> float:
    """`value` as a number; raises `Unreadable`, quoting `text`, if it is none or outside `limits`."""
    try:
        number = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not limits[0] <= number <= limits[1]:
        raise Unreadable(
            f"the answer {_end(text)} gives {value!r:.80}, expected a number from {limits[0]:g} to {limits[1]:g}: "
            "change the template or limits"
        )
    return number


def text_of(choice: Choice) -> str:
    """The text of an answer, empty if it has none."""
    match choice:
        case {"message": {"content": str() as text}}:
            return text
    return ""


def probability_of_yes(choice: Choice, yes: list[str], no: list[str], min_mass: float) -> float:
    """p(yes) / (p(yes) + p(no)) of the first token, from its `top_logprobs`, in [0, 1].

    All spellings that differ only in case, spaces or punctuation count together. Raises `Unreadable` if there are no
    log-probabilities, or p(yes) + p(no) is below `min_mass`: then the model was about to say something else.
    """
    match choice.get("logprobs"):
        case {"content": [{"top_logprobs": [*entries]}, *_]} if entries:
            top = [_entry(entry) for entry in entries]
        case _:
            raise Unreadable("the answer has no top_logprobs: use a server that gives them, or mode=regex")
    agree, deny = (
        math.fsum(math.exp(logprob) for token, logprob in top if _bare(token) in set(map(_bare, words)))
        for words in (yes, no)
    )
    if not agree + deny >= min_mass:
        raise Unreadable(
            f"yes and no have a probability of {agree + deny:.3g}, less than min_mass={min_mass:g}, and the likeliest "
            f"first tokens are {', '.join(repr(token) for token, _ in top[:5])}: change the template"
        )
    return agree / (agree + deny)


def _entry(entry: JSON) -> tuple[str, float]:
    match entry:
        # Rounding may leave it a little above 0; NaN is not below anything.
        case {"token": str() as token, "logprob": float() | int() as given}:
            logprob = number_of(given)
            if logprob is not None and logprob < 0.01:
                return token, logprob
    raise Unreadable(f"the answer has {entry!r:.200} among its top_logprobs: expected a token and a log-probability")


def last_object(text: str, keys: list[str]) -> dict[str, JSON] | None:
    """The last JSON object in `text` that has all `keys`; whatever stands around it does not matter."""
    found = None
    text = text[-READ:]
    decoder = json.JSONDecoder()
    for match in re.finditer(r"\{", text):
        try:
            value, _ = decoder.raw_decode(text, match.start())
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict) and all(key in value for key in keys):
            found = value
    return found


def fill(template: str, prompt: str, metadata: Metadata, **fields: str) -> str:
    """`template` with {prompt}, `fields` and the columns of `metadata` in their places; other braces stay as they are.

    Raises `DataError` for a place that has no value.
    """
    values = {**metadata, **fields, "prompt": prompt}

    def value(match: re.Match[str]) -> str:
        name = match.group(1)
        if values.get(name) is None:
            raise DataError(
                f"{prompt!r} has no {name!r}, which the template of the judge asks for: add the column, or take "
                f"{{{name}}} out of the template"
            )
        return str(values[name])

    return PLACE.sub(value, template)


@dataclass(frozen=True, kw_only=True)
class VlmJudge(ChatScorer):
    """The verdict of a vision language model about image and prompt, in one of three `mode`s.

    regex: the number that `pattern` finds in the answer, divided by `scale`. yes_no: the probability of yes against no
    as the first word, in [0, 1], with `yes` and `no` the words that count. rubric: a number for each of `aspects`
    (name: question), divided by `scale`, as columns behind their mean, asked for in one request or, with `one_request`
    false, one by one. A number outside `limits` counts as no answer. Images are reduced to at most `image_size` pixels
    a side. `max_tokens` is by default 1 for yes_no, else 512.

    `template` may use {prompt}, the row's other columns, {low} and {high} (the limits), and in a rubric {aspects} and
    {keys}, or {question} where aspects are asked for one by one.
    """

    mode: Literal["regex", "yes_no", "rubric"] = "regex"
    template: str | None = None
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
            raise RewardError(f"limits={list(self.limits)}: give the least and the greatest number of an answer")
        if (self.mode == "rubric") != bool(self.aspects):
            raise RewardError(
                f"mode={self.mode} came with {len(self.aspects)} aspects: give them to a rubric, and to nothing else"
            )
        for name in self.aspects:
            if NAME.fullmatch(name) is None or name == "mean":
                raise RewardError(f"aspects.{name}: name it with letters, digits, _ and -, and not mean")
        both = {_bare(word) for word in self.yes} & {_bare(word) for word in self.no}
        if both or not all(map(_bare, [*self.yes, *self.no])) or not (self.yes and self.no):
            raise RewardError(f"yes={self.yes} and no={self.no}: give words of letters for each, and none for both")
        place = None if self.mode != "rubric" else "{aspects}" if self.one_request else "{question}"
        if place is not None and place not in self._template:
            raise RewardError(f"template has no {place}, so the judge would not know what to rate: add it")

    def __call__(
        self, images: list[Image.Image], prompts: list[str], metadata: list[Metadata]
    ) -> list[float] | Columns:
        with self.client(self.base_url) as client:

            def judge(item: tuple[Image.Image, str, Metadata]) -> dict[str, float]:
                image, prompt, row = item
                return self._judge(client, png_base64(at_most(image, self.image_size)), prompt, row)

            rows = client.map(judge, zip(images, prompts, metadata, strict=True))
        if self.mode != "rubric":
            return [row["score"] for row in rows]
        return {"mean": [fmean(row.values()) for row in rows]} | {
            name: [row[name] for row in rows] for name in self.aspects
        }

    def check_prompt(self, prompt: str, metadata: Metadata) -> None:
        self._text(prompt, metadata, "")

    @property
    def _template(self) -> str:
        templates = {"regex": RATE, "yes_no": YES_NO, "rubric": RUBRIC if self.one_request else ASPECT}
        return templates[self.mode] if self.template is None else self.template

    def _text(self, prompt: str, metadata: Metadata, question: str) -> str:
        fields = {"low": f"{self.limits[0]:g}", "high": f"{self.limits[1]:g}"}
        if self.mode == "rubric":
            fields["question"] = question
            fields["aspects"] = "\n".join(f"- {name}: {text}" for name, text in self.aspects.items())
            fields["keys"] = ", ".join(f'"{name}"' for name in self.aspects)
        return fill(self._template, prompt, metadata, **fields)

    def _judge(self, client: Client, image: str, prompt: str, metadata: Metadata) -> dict[str, float]:
        """The score of an image, or that of each aspect."""

        def ask(read: Callable[[Choice], Answer], question: str = "", tokens: int = 512, **body: object) -> Answer:
            text = self._text(prompt, metadata, question)
            return self.ask(client, prompt, text, image, read, max_tokens=self.max_tokens or tokens, **body)

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
                f"the answer {_end(text)} has no JSON object with the keys {', '.join(self.aspects)}"
                f"{_cut_off(choice)}: change the template"
            )
        return {name: within(found[name], self.limits, text) / self.scale for name in self.aspects}


def check_pattern(pattern: str) -> None:
    """Raise `RewardError` unless `pattern` is a regular expression with a group for the number."""
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        raise RewardError(f"pattern={pattern!r} is no regular expression ({error}): correct it") from None
    if groups < 1:
        raise RewardError(f"pattern={pattern!r} has no group: put parentheses around the number")


def _bare(token: str) -> str:
    """A token without case, spaces and punctuation; ▁ and Ġ are how tokenizers write a space."""
    return token.strip(string.whitespace + string.punctuation + "▁Ġ").casefold()


def _end(text: str) -> str:
    return repr("..." + text[-200:] if len(text) > 200 else text)


def _cut_off(choice: Choice) -> str:
    return " and was cut off, raise max_tokens" if choice.get("finish_reason") == "length" else ""
