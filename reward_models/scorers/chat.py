"""Base class of scorers that query a chat model: request and parsing of the answer.

The model is a vision language model behind an OpenAI-compatible endpoint, such as vLLM, SGLang, llama.cpp or a paid
API.
"""

import json
import logging
import math
import re
import string
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Annotated, TypeVar

from PIL import Image
from pydantic import Field

from gerl.errors import DataError, RewardError
from gerl.rewards.scorers.base import JSON, Metadata
from gerl.rewards.worker import number_of
from reward_models.scorers.http import Client, HttpScorer, at_most, check_url, png_base64

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")
Choice = dict[str, JSON]  # of a chat completion

PLACE = re.compile(r"\{(\w+)\}")
# matches up to the end of the number: a prefix of 1e999, 7,5 or 1,000 is a different number
WHOLE_NUMBER = r"(?>\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)(?![.,]?\d)"
READ = 10**5  # characters at the end of an answer that are searched for a JSON object


class Unreadable(RewardError):
    """Error for a judge's answer that does not have the requested form."""


@dataclass(frozen=True, kw_only=True)
class ChatScorer(HttpScorer):
    """Scorer that queries `model` at the chat completions of `base_url` (such as http://127.0.0.1:8000/v1).

    The temperature is 0. `extra_body` adds fields to each request, such as {chat_template_kwargs: {enable_thinking:
    false}}; they override gerl's fields, and null removes one. An unreadable answer is requested again up to
    `answer_retries` times. Images are downscaled to at most `image_size` pixels a side.
    """

    base_url: str
    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    extra_body: dict[str, object] = field(default_factory=dict)
    answer_retries: Annotated[int, Field(ge=0)] = 2
    image_size: Annotated[int, Field(ge=1)] | None = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        check_url("base_url", self.base_url)

    def png(self, image: Image.Image) -> str:
        """Return the image as sent, a PNG in base64."""
        return png_base64(at_most(image, self.image_size))

    def ask(
        self,
        client: Client,
        prompt: str,
        text: str,
        images: Sequence[str],
        read: Callable[[Choice], Answer],
        **body: object,
    ) -> Answer:
        """Return the value that `read` extracts from the model's answer to `images` (PNG in base64) followed by `text`.

        `prompt` is the prompt of the last image, for error messages; `body` adds fields to the request.

        Raises `RewardError` if the request failed or no answer could be read.
        """
        urls = [f"data:image/png;base64,{image}" for image in images]
        content = [*({"type": "image_url", "image_url": {"url": url}} for url in urls), {"type": "text", "text": text}]
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
    """Return the first choice of a chat completion; raises `RewardError` if `completion` is not one."""
    match completion:
        case {"choices": [dict() as choice, *_]} if isinstance(choice.get("message"), dict):
            return choice
    raise RewardError(
        f"{client.url} did not return a chat completion, {client.quoted(completion)}: give the address of an "
        "OpenAI-compatible endpoint, which usually ends in /v1"
    )


def number_in(choice: Choice, pattern: str, limits: tuple[float, float]) -> float:
    """Return the number in the first group of the last match of `pattern` in the answer's text.

    The last match, because a judge that reasons mentions other numbers before its verdict. Raises `Unreadable` if there
    is no match, or the number is outside `limits`.
    """
    text = text_of(choice)
    numbers = [match.group(1) for match in re.finditer(pattern, text)]
    if not numbers:
        raise Unreadable(f"the answer {ending(text)} has no match of {pattern!r}: change the template")
    return within(numbers[-1], limits, text)


def within(value: JSON, limits: tuple[float, float], text: str) -> float:
    """Return `value` as a number; raises `Unreadable`, quoting `text`, if it is not one or is outside `limits`."""
    try:
        number = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not limits[0] <= number <= limits[1]:
        raise Unreadable(
            f"the answer {ending(text)} gives {value!r:.80}, expected a number from {limits[0]:g} to "
            f"{limits[1]:g}: change the template or limits"
        )
    return number


def text_of(choice: Choice) -> str:
    """Return the text of a finished answer, empty if it has none; raises `Unreadable` if the answer was truncated.

    The truncated part may contain a different verdict.
    """
    match choice:
        case {"message": {"content": str() as text}}:
            pass
        case _:
            text = ""
    _check_ended(choice, ("stop",), text)
    return text


def _check_ended(choice: Choice, reasons: Collection[str], text: str) -> None:
    """Raise `Unreadable`, quoting `text`, unless `finish_reason` is one of `reasons`."""
    reason = choice.get("finish_reason")
    if reason in reasons:
        return
    if reason == "length":
        raise Unreadable(f"the answer {ending(text)} was truncated, so it is not a verdict: raise max_tokens")
    raise Unreadable(
        f"the answer {ending(text)} has finish_reason={reason!r:.80}, expected {' or '.join(reasons)}: only a finished "
        "answer is a verdict"
    )


def probability_of_yes(choice: Choice, yes: list[str], no: list[str], min_mass: float) -> float:
    """Return p(yes) / (p(yes) + p(no)) of the first token, from its `top_logprobs`, in [0, 1].

    Spellings that differ only in case, spaces or punctuation are summed. Raises `Unreadable` if there are no
    log-probabilities, or if p(yes) + p(no) is below `min_mass`: the model's answer then begins with another word.
    """
    top = first_tokens(choice)
    agree, deny = probability_of(top, yes), probability_of(top, no)
    if not agree + deny >= min_mass:
        raise Unreadable(
            f"yes and no have a probability of {agree + deny:.3g}, less than min_mass={min_mass:g}, and the "
            f"likeliest first tokens are {', '.join(repr(token) for token, _ in top[:5])}: change the template"
        )
    return agree / (agree + deny)


def probability_of(top: Sequence[tuple[str, float]], words: Collection[str]) -> float:
    """Return the probability that the first token is one of `words`, ignoring case, spaces and punctuation."""
    wanted = set(map(bare, words))
    return math.fsum(math.exp(logprob) for token, logprob in top if bare(token) in wanted)


def first_tokens(choice: Choice) -> list[tuple[str, float]]:
    """Return the top first tokens of an answer with log-probabilities; raises `Unreadable` if missing."""
    _check_ended(choice, ("stop", "length"), "")  # truncation after the first token does not matter
    match choice.get("logprobs"):
        case {"content": [{"top_logprobs": [*entries]}, *_]} if entries:
            return [_entry(entry) for entry in entries]
    raise Unreadable("the answer has no top_logprobs: use a server that returns them, or mode=regex")


def _entry(entry: JSON) -> tuple[str, float]:
    match entry:
        # Rounding may give slightly more than 0; NaN fails the comparison.
        case {"token": str() as token, "logprob": float() | int() as given}:
            logprob = number_of(given)
            if logprob is not None and logprob < 0.01:
                return token, logprob
    raise Unreadable(f"the answer has {entry!r:.200} among its top_logprobs: expected a token and a log-probability")


def last_object(text: str, keys: list[str]) -> dict[str, JSON] | None:
    """Return the last JSON object in `text` that has all `keys`, ignoring the text around it; None if missing."""
    last = None
    text = text[-READ:]
    decoder = json.JSONDecoder()
    for match in re.finditer(r"\{", text):
        try:
            value, _ = decoder.raw_decode(text, match.start())
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict) and all(key in value for key in keys):
            last = value
    return last


def fill(template: str, prompt: str, metadata: Metadata, **fields: str) -> str:
    """Substitute {prompt}, `fields` and the columns of `metadata` in `template`; other braces are left unchanged.

    Raises `DataError` for a placeholder without a value.
    """
    values = {**metadata, **fields, "prompt": prompt}

    def value(match: re.Match[str]) -> str:
        name = match.group(1)
        if values.get(name) is None:
            raise DataError(
                f"{prompt!r} has no {name!r}, which the judge's template requires: add the column, or remove "
                f"{{{name}}} from the template"
            )
        return str(values[name])

    return PLACE.sub(value, template)


def bare(token: str) -> str:
    """Return a token without case, spaces and punctuation; ▁ and Ġ are tokenizers' marks for a space."""
    return token.strip(string.whitespace + string.punctuation + "▁Ġ").casefold()


def ending(text: str) -> str:
    return repr("..." + text[-200:] if len(text) > 200 else text)
