"""The turns of an episode: what is asked in each, and the prompts of a turn from the images of the one before.

Pure functions of configuration, prompts and images, for training, validation and evaluation alike.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from gerl.config import Config
from gerl.config.episodes import ASKED, TurnConfig
from gerl.config.user_files import load_module, raised_at
from gerl.errors import ConfigError
from gerl.protocol import Prompt, Sample, Scores, Turn
from gerl.utils.pages import still

if TYPE_CHECKING:
    from gerl.rewards.rollouts import Dispatch

Request = Callable[[Prompt, np.ndarray | None, Mapping[str, float]], str]


class Turns:
    """The turns of the episodes of a run. Raises `ConfigError` if a file or function of a request is missing."""

    def __init__(self, config: Config) -> None:
        self.episode, self.parsed = config.episode, config.episode.parsed
        self.requests = [
            request_of(turn, number, self.episode.is_text(turn.role)) for number, turn in enumerate(self.parsed)
        ]

    def __len__(self) -> int:
        return len(self.parsed)

    @property
    def writes(self) -> bool:
        """Whether the first turn rewrites the prompts."""
        return self.episode.is_text(self.parsed[0].role)

    @property
    def of_images(self) -> range:
        """Return the numbers of the turns that sample images."""
        return range(int(self.writes), len(self.parsed))

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Raise `ConfigError` if a template names a column that one of `prompts` lacks."""
        for turn, ask in zip(self.parsed, self.requests, strict=True):
            if turn.request is not None and not is_function(turn.request):
                for prompt in prompts:
                    ask(prompt, None, {})

    def first(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Return `prompts` as the first turn asks them."""
        role, ask = self.parsed[0].role, self.requests[0]
        return [replace(prompt, turn=Turn(0, role, ask(prompt, None, {}))) for prompt in prompts]

    def rewritten(self, samples: Sequence[Sample], texts: Sequence[str]) -> list[Prompt]:
        """Return the prompts of the second turn, which samples images of the `texts` of the first."""
        role = self.parsed[1].role
        return [
            replace(sample.prompt, turn=Turn(1, role, text, None, sample.index))
            for sample, text in zip(samples, texts, strict=True)
        ]

    def following(self, number: int, scores: Scores, pixels: Sequence[np.ndarray], rows: Sequence[int]) -> list[Prompt]:
        """Return the prompts of turn `number`, which start from the images `rows` of the turn before."""
        following, states = list[Prompt](), dict[int, int]()
        for row in rows:
            prompt = scores.samples[row].prompt
            states[prompt.id] = states.get(prompt.id, -1) + 1
            row_scores = {name: v for name, values in scores.by_scorer.items() if (v := values[row]) is not None}
            request = self.requests[number](prompt, pixels[row], row_scores)
            turn = Turn(number, self.parsed[number].role, request, pixels[row], states[prompt.id])
            following.append(replace(prompt, turn=turn))
        return following


def written(dispatch: Dispatch, batches: Sequence[Sequence[Sample]]) -> list[str]:
    """Return the texts that a language model writes for the samples of `batches`."""
    calls = [dispatch.submit(i) for i in range(len(batches))]
    texts = [text for call in calls for text in call.result().pixels]
    dispatch.finish()
    return texts


def is_function(request: str) -> bool:
    """Whether a request is FILE.py:function, not a template."""
    return request.rpartition(":")[0].endswith(".py")


def request_of(turn: TurnConfig, number: int, text: bool) -> Request:
    """Return the function that writes the request of a turn, "" for the prompt itself.

    Raises `ConfigError` if the file or the function is missing.
    """
    key, request = f"episode.turns[{number}].request", turn.request
    if request is None and text:
        request = ASKED
    if request is None:
        return lambda prompt, image, scores: ""
    if not is_function(request):
        return lambda prompt, image, scores: filled(request, prompt, key)
    path, _, name = request.rpartition(":")
    function = getattr(load_module(key, path, ConfigError), name, None)
    if not callable(function):
        raise ConfigError(f"{key}={request}: {path} has no function {name}; correct the name")
    parameters = inspect.signature(function).parameters

    def ask(prompt: Prompt, image: np.ndarray | None, scores: Mapping[str, float]) -> str:
        picture = None if image is None else Image.fromarray(still(image) if image.ndim == 4 else image)
        arguments = {"prompt": prompt.text, "image": picture, "scores": dict(scores), "metadata": prompt.metadata}
        try:
            text = function(**{name: value for name, value in arguments.items() if name in parameters})
        except Exception as error:  # of the user's code
            what = f"{type(error).__name__}: {error}{raised_at(error, path)}"
            raise ConfigError(f"{key}={request}: it failed for the prompt {prompt.text!r:.80} with {what}") from error
        if not isinstance(text, str) or not text.strip():
            raise ConfigError(
                f"{key}={request}: it returned {text!r:.80} for the prompt {prompt.text!r:.80}; return a text"
            )
        return text

    return ask


def filled(template: str, prompt: Prompt, key: str) -> str:
    """Fill a template with the prompt and its columns; raises `ConfigError` for a name that is not one of them."""
    try:
        return template.format_map({**prompt.metadata, "prompt": prompt.text})
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{key}={template!r}: {error} is not a column of the prompt {prompt.text!r:.80}, which has "
            f"{', '.join(['prompt', *prompt.metadata])}; correct the template, or add the column to the prompt file"
        ) from None
