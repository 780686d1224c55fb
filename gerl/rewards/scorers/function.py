"""A reward that is a function of the program that started the run."""

import inspect
import traceback
from types import CodeType
from typing import Any

from PIL import Image

from gerl.errors import RewardError
from gerl.objects import PREFIX, Function, function
from gerl.rewards.scorers.base import Metadata, Scorer

GIVEN = 3  # images, prompts, metadata


class FunctionScorer(Scorer):
    """Calls a function of images, prompts and metadata [B], or of the first one or two of these, and its kwargs.

    The attributes `groupwise` and `takes_frames` of the function, where it has them, mean what they do for `Scorer`.
    Raises `RewardError` if the function is not here, or does not take these arguments.
    """

    def __init__(self, key: str, path: str, kwargs: dict[str, object]) -> None:
        found = function(path)
        if found is None:
            raise RewardError(
                f"{key}.path={path}: this was a function of a Python program; give it again there, with "
                "gerl.train(..., resume=FOLDER) or gerl.evaluate(..., reward=FUNCTION), or give the file of a function"
            )
        self.function: Function = found
        self.kwargs = kwargs
        self.taken = taken(key, path.removeprefix(PREFIX), found, kwargs)
        self.groupwise = bool(getattr(found, "groupwise", False))
        self.takes_frames = bool(getattr(found, "takes_frames", False))

    def __call__(self, images: list[Image.Image], prompts: list[str], metadata: list[Metadata]) -> object:
        return self.function(*(images, prompts, metadata)[: self.taken], **self.kwargs)

    def place(self, error: BaseException | None = None) -> str:
        code = getattr(inspect.unwrap(self.function), "__code__", None)
        if not isinstance(code, CodeType):
            return ""
        if error is None:
            return f" ({code.co_filename}, line {code.co_firstlineno}: {code.co_name})"
        own = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == code.co_filename]
        return f" ({code.co_filename}, line {own[-1].lineno}: {own[-1].line})" if own else ""


def taken(key: str, name: str, given: Function, kwargs: dict[str, Any]) -> int:
    """How many of images, prompts and metadata `given` takes; raises `RewardError` if it cannot be called so."""
    try:
        signature = inspect.signature(given)
    except (TypeError, ValueError):  # of a builtin
        return GIVEN
    for count in range(GIVEN, 0, -1):
        try:
            signature.bind(*[[]] * count, **kwargs)
        except TypeError:
            continue
        return count
    raise RewardError(
        f"{key}: {name}{signature} cannot be called as {name}(images, prompts, metadata"
        f"{''.join(f', {k}=...' for k in kwargs)}): give a function of these, or of images alone"
    )
