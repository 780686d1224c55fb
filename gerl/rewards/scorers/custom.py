"""A user's own scorer: a function in a Python file."""

import hashlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from gerl.errors import RewardError
from gerl.rewards.scorers.calling import GIVEN, Call, UserScorer


class CustomScorer(UserScorer):
    """Calls a function of images, prompts and metadata [B], or of some of these, and its kwargs: see `Call`.

    It is `function` of the Python file `path`. `key` is the configuration key of the scorer, for messages. Relative
    paths are from the current directory.

    Raises:
        RewardError: the file or the function is missing, the file fails, or the function does not take these arguments.
    """

    def __init__(self, key: str, path: str, function: str, kwargs: dict[str, object]) -> None:
        self.path = path
        super().__init__(Call(key, function, _function(key, path, function), kwargs))

    def place(self, error: BaseException | None = None) -> str:
        """Where in the user's file `error` was raised or, without one, the function begins; see `Scorer.place`."""
        if error is not None:
            return raised_at(error, self.path)
        code = getattr(self.call.function, "__code__", None) or getattr(
            type(self.call.function).__call__, "__code__", None
        )
        if not isinstance(code, CodeType) or Path(code.co_filename) != _absolute(self.path):
            return f" ({self.path})"  # it comes from elsewhere
        return f" ({self.path}, line {code.co_firstlineno}: {code.co_name})"


def raised_at(error: BaseException, path: str) -> str:
    """` (PATH, line N: code)` of the last line of the file `path` that took part in `error`; empty if none did."""
    own = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == _absolute(path)]
    return f" ({path}, line {own[-1].lineno}: {own[-1].line})" if own else ""


def _absolute(path: str) -> Path:
    return Path(path).expanduser().absolute()


def _function(key: str, path: str, function: str) -> Callable[..., object]:
    module = load_module(key, path)
    found: Callable[..., object] | None = getattr(module, function, None)
    if found is None:
        names = [
            n for n, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == module.__name__
        ]
        likely = [n for n in names if set(inspect.signature(getattr(module, n)).parameters) & set(GIVEN)] or names
        only = f", only {', '.join(names)}" if names else ""
        raise RewardError(
            f"{key}.function={function}: {path} defines no such function{only}; "
            + (f"set {key}.function={likely[0]}" if likely else f"add def {function}(images, prompts, metadata)")
        )
    if not callable(found):
        raise RewardError(f"{key}.function={function}: in {path} it is a {type(found).__name__}; name a function")
    return found


class _Uncached(SourceFileLoader):
    """Compiles the file from its text, and leaves no `__pycache__` beside it.

    Python goes by size and second: it would use the bytecode of a version of the same size from the same second.
    """

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def load_module(key: str, path: str) -> ModuleType:
    """Import the Python file `path`; two files never share a module, and an unchanged file is run once a process."""
    file = _absolute(path)
    if not file.is_file() or file.suffix != ".py":
        raise RewardError(f"{key}.path={path}: there is no Python file {file}; correct the path")
    digest = hashlib.sha256(str(file).encode() + b"\0" + file.read_bytes()).hexdigest()
    name = f"gerl_custom_scorer_{digest[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file, loader=_Uncached(name, str(file)))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up here
    try:
        spec.loader.exec_module(module)
    # The file is the user's: whatever it raises is reported as its failure, sys.exit as well.
    except BaseException as error:
        del sys.modules[name]
        if not isinstance(error, Exception | SystemExit):
            raise
        what = f"{type(error).__name__}: {error}{raised_at(error, path)}"
        raise RewardError(f"{key}.path={path}: importing it failed with {what}") from error
    return module
