"""A reward that is a function of the program that started the run."""

import inspect
import traceback
from types import CodeType
from typing import TYPE_CHECKING, Any

from PIL import Image

from gerl.errors import RewardError
from gerl.objects import PREFIX, Function, function
from gerl.rewards.scorers.base import Metadata, Scorer
from gerl.rewards.scorers.tensor_function import checked, on_pictures

if TYPE_CHECKING:
    import torch

GIVEN = 3  # images, prompts, metadata


class FunctionScorer(Scorer):
    """Calls a function of images, prompts and metadata [B], or of the first one or two of these, and its kwargs.

    The attributes `groupwise`, `takes_frames` and `takes_tensors` of the function mean what they do for `CustomScorer`.
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
        self.differentiable = bool(getattr(found, "takes_tensors", False))

    def __call__(self, images: list[Image.Image], prompts: list[str], metadata: list[Metadata]) -> object:
        if self.differentiable:
            return on_pictures(self._called, images, prompts, metadata)
        return self._called(images, prompts, metadata)

    def tensor_scores(self, images: "torch.Tensor", prompts: list[str], metadata: list[Metadata]) -> "torch.Tensor":
        return checked(self._called(images, prompts, metadata), images, self.place())

    def _called(self, *given: object) -> object:
        return self.function(*given[: self.taken], **self.kwargs)

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
