"""How a function of the user's is called: by the names of its parameters, where they say what they are for."""

from __future__ import annotations  # of torch, which the driver of a run may do without

import inspect
from collections.abc import Callable, Mapping
from inspect import Parameter
from typing import TYPE_CHECKING, Any

from PIL import Image

from gerl.errors import RewardError
from gerl.rewards.scorers.base import Metadata, Scorer
from gerl.rewards.scorers.tensor_function import checked, on_pictures

if TYPE_CHECKING:
    import torch

GIVEN = ("images", "prompts", "metadata")  # in the order in which parameters of other names get them
# Names of parameters without a default that leave no doubt either; those of `GIVEN` are meant with a default, too.
SYNONYMS = {
    "images": ("image", "imgs", "img", "pictures", "pixels", "videos", "video"),
    "prompts": ("prompt", "texts", "text", "captions", "caption"),
    "metadata": ("metadatas", "meta", "metas"),
}
OF_TRL = ("completions", "completion_ids")
PLAIN = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


class Call:
    """A function with what each of its parameters gets: one of `GIVEN`, or its own keyword.

    Raises:
        RewardError: it cannot be called so; the message begins with `key` and calls the function `name`.
    """

    def __init__(self, key: str, name: str, function: Callable[..., Any], kwargs: Mapping[str, object]) -> None:
        self.function, self.kwargs = function, dict(kwargs)
        _check_kind(key, name, function)
        try:
            # torch's modules take anything, and hand it on to their forward
            signature = inspect.signature(function if inspect.isroutine(function) else _forward(function))
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
        given = {"images": images, "prompts": prompts, "metadata": metadata}
        named = {parameter: given[what] for parameter, what in self.named.items()}
        return self.function(*(given[what] for what in self.positional), **named, **self.kwargs)


def _forward(function: Callable[..., Any]) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(function, "forward", function)
    return found


def _check_kind(key: str, name: str, function: Callable[..., Any]) -> None:
    """Raise `RewardError` for a class in place of an object of it, and for what has to be awaited."""
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
    """The positional arguments, and by parameter those that are passed by keyword.

    Parameters whose names are known get what they say; others without a default what is left, in the order of `GIVEN`.
    """
    parameters = [p for p in signature.parameters.values() if p.name not in kwargs]
    if foreign := next((p.name for p in parameters if p.name in OF_TRL), None):
        raise RewardError(
            f"{key}: {name}{signature} is a TRL reward function, which gets texts: gerl passes images, so rename "
            f"its parameter {foreign} to images, and return one number per image"
        )
    if any(p.kind is Parameter.VAR_POSITIONAL for p in parameters):
        return list(GIVEN), {}
    single = [p for p in parameters if p.kind in (*PLAIN, Parameter.KEYWORD_ONLY)]
    found = {p.name: p.name for p in single if p.name in GIVEN}
    required = [p for p in single if p.default is Parameter.empty and p.name not in found]
    for what, names in SYNONYMS.items():
        if what not in found.values() and (meant := [p for p in required if p.name in names]):
            found[meant[0].name] = what
    left = [what for what in GIVEN if what not in found.values()]
    for parameter, what in zip((p for p in required if p.name not in found and p.kind in PLAIN), left, strict=False):
        found[parameter.name] = what
    positional = []
    for parameter in signature.parameters.values():  # by position as far as it goes: a decorator may take no keywords
        if parameter.name not in found or parameter.kind not in PLAIN:
            break
        positional.append(found.pop(parameter.name))
    return positional, found


class UserScorer(Scorer):
    """A scorer that calls a function of the user's, whose attributes say how.

    `groupwise` and `takes_frames` mean what they do for `Scorer`; with `takes_tensors` it is given tensors, see
    `tensor_function`.
    """

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
