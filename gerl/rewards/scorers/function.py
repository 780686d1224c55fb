"""A reward that is a function of the program that started the run."""

import inspect
import traceback
from types import CodeType

from gerl.errors import RewardError
from gerl.objects import PREFIX, function
from gerl.rewards.scorers.calling import Call, UserScorer


class FunctionScorer(UserScorer):
    """Calls a function of images, prompts and metadata [B], or of some of these, and its kwargs: see `Call`.

    Raises `RewardError` if the function is not here, or does not take these arguments.
    """

    def __init__(self, key: str, path: str, kwargs: dict[str, object]) -> None:
        found = function(path)
        if found is None:
            raise RewardError(
                f"{key}.path={path}: this was a function of a Python program; pass it again there, with "
                "gerl.train(..., resume=FOLDER) or gerl.evaluate(..., reward=FUNCTION), or give the file of a "
                "function"
            )
        super().__init__(Call(key, path.removeprefix(PREFIX), found, kwargs))

    def place(self, error: BaseException | None = None) -> str:
        code = getattr(inspect.unwrap(self.call.function), "__code__", None)
        if not isinstance(code, CodeType):
            return ""
        if error is None:
            return f" ({code.co_filename}, line {code.co_firstlineno}: {code.co_name})"
        own = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == code.co_filename]
        return f" ({code.co_filename}, line {own[-1].lineno}: {own[-1].line})" if own else ""
