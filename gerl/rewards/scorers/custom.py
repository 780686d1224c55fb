"""Custom scorers: functions from a file or from the calling program, on images or on tensors."""

from __future__ import annotations  # torch is imported lazily

import inspect
import traceback
from collections.abc import Callable, Mapping
from inspect import Parameter
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

from PIL import Image

from gerl.config.user_files import absolute, load_module, neighbours_of, raised_at
from gerl.errors import RewardError
from gerl.objects import PREFIX, function
from gerl.rewards.scorers.base import Metadata, ReturnError, Scorer

if TYPE_CHECKING:
    import torch


# --- Custom functions on tensors, for differentiable rewards
#
# A function with a true attribute `takes_tensors` gets images `[B, 3, H, W]`, fp32 in [0, 1], and returns scores `[B]`
# as a tensor; with `takes_frames` it gets videos `[B, F, 3, H, W]`. If only scores are needed, as in validation, it
# gets the decoded images in the same form.


def on_pictures(called: Callable[..., object], images: list[Any], prompts: list[str], metadata: list[Any]) -> object:
    """Score PIL images or lists of frames with `called`, one at a time because sizes may differ."""
    import torch

    from gerl.utils.tensors import tensors_of

    scores: list[float] = []
    for i, image in enumerate(images):
        pixels = tensors_of(image)[None] if isinstance(image, list) else tensors_of([image])
        with torch.no_grad():
            score = called(pixels, prompts[i : i + 1], metadata[i : i + 1])
        if not torch.is_tensor(score) or score.shape != (1,):
            what = f"a tensor of shape {list(score.shape)}" if torch.is_tensor(score) else f"{score!r:.80}"
            raise ReturnError(
                f"returned {what} for images {list(pixels.shape)}, expected a tensor with one score per image, [1]"
            )
        scores.append(float(score))
    return scores


def checked(scores: object, images: torch.Tensor, place: str) -> torch.Tensor:
    """Return the `scores` of `images`; raises `RewardError` unless they are a tensor `[B]` with a gradient."""
    import torch

    shape = list(scores.shape) if isinstance(scores, torch.Tensor) else type(scores).__name__
    if not isinstance(scores, torch.Tensor) or shape != [len(images)]:
        raise RewardError(
            f"a reward that takes tensors returned {shape} for images {list(images.shape)}: return a tensor with "
            f"one score per image, [{len(images)}]{place}"
        )
    if images.requires_grad and not scores.requires_grad:
        raise RewardError(
            "a reward that takes tensors returned scores without gradient: compute them from the images with torch "
            f"functions, without no_grad, detach or numpy{place}"
        )
    return scores


# --- Argument binding of a custom function, by parameter names if they are known

GIVEN = ("images", "prompts", "metadata")  # in the order in which parameters with other names receive them
# unambiguous names of parameters without a default; names in `GIVEN` count even with a default
SYNONYMS = {
    "images": ("image", "imgs", "img", "pictures", "pixels", "videos", "video"),
    "prompts": ("prompt", "texts", "text", "captions", "caption"),
    "metadata": ("metadatas", "meta", "metas"),
}
OF_TRL = ("completions", "completion_ids")
PLAIN = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


class Call:
    """Custom function with its argument binding: each parameter receives one of `GIVEN`, or its own keyword.

    Raises:
        RewardError: it cannot be called like this; the message begins with `key` and calls the function `name`.
    """

    def __init__(self, key: str, name: str, function: Callable[..., Any], kwargs: Mapping[str, object]) -> None:
        self.function, self.kwargs = function, dict(kwargs)
        _check_kind(key, name, function)
        try:
            # torch modules accept anything and pass it to their forward
            routine = function if inspect.isroutine(function) else getattr(function, "forward", function)
            signature = inspect.signature(routine)
        except (TypeError, ValueError):  # of a builtin
            self.positional, self.named = list(GIVEN), dict[str, str]()
            return
        self.positional, self.named = _assigned(key, name, signature, self.kwargs)
        try:
            if not self.positional and not self.named:
                raise TypeError("it takes none of them")
            signature.bind(*self.positional, **self.named, **self.kwargs)
        except TypeError as error:
            wanted = ", ".join([*GIVEN, *(f"{kwarg}=..." for kwarg in kwargs)])
            raise RewardError(
                f"{key}: {name}{signature} cannot be called as {name}({wanted}) ({error}): use a function of "
                f"these, or of images alone, and put other arguments in {key}.kwargs"
            ) from None

    def __call__(self, images: object, prompts: list[str], metadata: list[Metadata]) -> object:
        values = {"images": images, "prompts": prompts, "metadata": metadata}
        named = {parameter: values[what] for parameter, what in self.named.items()}
        return self.function(*(values[what] for what in self.positional), **named, **self.kwargs)


def _check_kind(key: str, name: str, function: Callable[..., Any]) -> None:
    """Raise `RewardError` for a class instead of an instance, and for an async function."""
    if inspect.isclass(function):
        raise RewardError(
            f"{key}: {name} is a class, and calling it creates an object, not scores: give a callable object, {name}()"
        )
    called = function if inspect.isroutine(function) else type(function).__call__
    if any(kind(f) for f in (function, called) for kind in (inspect.iscoroutinefunction, inspect.isasyncgenfunction)):
        raise RewardError(
            f"{key}: {name} is async, and gerl awaits nothing: define it with def, and use asyncio.run inside"
        )


def _assigned(
    key: str, name: str, signature: inspect.Signature, kwargs: Mapping[str, object]
) -> tuple[list[str], dict[str, str]]:
    """Return positional arguments and keywords: by known names, then the parameters without default as in `GIVEN`."""
    parameters = [p for p in signature.parameters.values() if p.name not in kwargs]
    if foreign := next((p.name for p in parameters if p.name in OF_TRL), None):
        raise RewardError(
            f"{key}: {name}{signature} is a TRL reward function, which gets texts: gerl passes images, so rename "
            f"its parameter {foreign} to images, and return one number per image"
        )
    if any(p.kind is Parameter.VAR_POSITIONAL for p in parameters):
        return list(GIVEN), {}
    single = [p for p in parameters if p.kind in (*PLAIN, Parameter.KEYWORD_ONLY)]
    assigned = {p.name: p.name for p in single if p.name in GIVEN}
    required = [p for p in single if p.default is Parameter.empty and p.name not in assigned]
    for what, names in SYNONYMS.items():
        if what not in assigned.values() and (meant := [p for p in required if p.name in names]):
            assigned[meant[0].name] = what
    left = [what for what in GIVEN if what not in assigned.values()]
    for parameter, what in zip((p for p in required if p.name not in assigned and p.kind in PLAIN), left, strict=False):
        assigned[parameter.name] = what
    positional = []
    for parameter in signature.parameters.values():  # by position where possible: a decorator may not accept keywords
        if parameter.name not in assigned or parameter.kind not in PLAIN:
            break
        positional.append(assigned.pop(parameter.name))
    return positional, assigned


class UserScorer(Scorer):
    """Scorer that calls a custom function, with its attributes; with `takes_tensors` the function gets tensors."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.groupwise = bool(getattr(call.function, "groupwise", False))
        self.takes_frames = bool(getattr(call.function, "takes_frames", False))
        self.differentiable = bool(getattr(call.function, "takes_tensors", False))

    def __call__(self, images: list[Image.Image], prompts: list[str], metadata: list[Metadata]) -> object:
        if self.differentiable:
            return on_pictures(self.call, images, prompts, metadata)
        return self.call(images, prompts, metadata)

    def tensor_scores(self, images: torch.Tensor, prompts: list[str], metadata: list[Metadata]) -> torch.Tensor:
        return checked(self.call(images, prompts, metadata), images, self.place())


# --- Custom scorer from a Python file


class CustomScorer(UserScorer):
    """Scorer that calls `function` of the file `path` (see `Call`); raises `RewardError`, with `key`, if it cannot."""

    def __init__(self, key: str, path: str, function: str, kwargs: dict[str, object]) -> None:
        self.path, self.module = path, load_module(f"{key}.path", path, RewardError)
        super().__init__(Call(key, function, _function(key, path, function, self.module), kwargs))

    def __call__(self, images: list[Image.Image], prompts: list[str], metadata: list[Metadata]) -> object:
        with neighbours_of(self.module):
            return super().__call__(images, prompts, metadata)

    def tensor_scores(self, images: torch.Tensor, prompts: list[str], metadata: list[Metadata]) -> torch.Tensor:
        with neighbours_of(self.module):
            return super().tensor_scores(images, prompts, metadata)

    def place(self, error: BaseException | None = None) -> str:
        """Return where `error` was raised in the user's file, or where the function begins; see `Scorer.place`."""
        if error is not None:
            return raised_at(error, self.path)
        code = getattr(self.call.function, "__code__", None) or getattr(
            type(self.call.function).__call__, "__code__", None
        )
        if not isinstance(code, CodeType) or Path(code.co_filename) != absolute(self.path):
            return f" ({self.path})"  # defined elsewhere
        return f" ({self.path}, line {code.co_firstlineno}: {code.co_name})"


def _function(key: str, path: str, function: str, module: ModuleType) -> Callable[..., object]:
    member: Callable[..., object] | None = getattr(module, function, None)
    if member is None:
        names = [
            n for n, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == module.__name__
        ]
        likely = [n for n in names if set(inspect.signature(getattr(module, n)).parameters) & set(GIVEN)] or names
        only = f", only {', '.join(names)}" if names else ""
        raise RewardError(
            f"{key}.function={function}: {path} defines no such function{only}; "
            + (f"set {key}.function={likely[0]}" if likely else f"add def {function}(images, prompts, metadata)")
        )
    if not callable(member):
        raise RewardError(f"{key}.function={function}: in {path} it is a {type(member).__name__}; name a function")
    return member


# --- Custom scorer from the calling program


class FunctionScorer(UserScorer):
    """Scorer that calls a program's function, see `Call`; raises `RewardError` if it is missing or does not fit."""

    def __init__(self, key: str, path: str, kwargs: dict[str, object]) -> None:
        scorer = function(path)
        if scorer is None:
            raise RewardError(
                f"{key}.path={path}: this was a function of a Python program; pass it again there, with "
                "gerl.train(..., resume=FOLDER) or gerl.evaluate(..., reward=FUNCTION), or give the file of a "
                "function"
            )
        super().__init__(Call(key, path.removeprefix(PREFIX), scorer, kwargs))

    def place(self, error: BaseException | None = None) -> str:
        code = getattr(inspect.unwrap(self.call.function), "__code__", None)
        if not isinstance(code, CodeType):
            return ""
        if error is None:
            return f" ({code.co_filename}, line {code.co_firstlineno}: {code.co_name})"
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == code.co_filename]
        return f" ({code.co_filename}, line {frames[-1].lineno}: {frames[-1].line})" if frames else ""
