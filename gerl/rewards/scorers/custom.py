"""A user's own scorer: a function in a Python file."""

import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from PIL import Image

from gerl.errors import Interrupted, RewardError
from gerl.rewards.scorers.base import Metadata, Scorer


class CustomScorer(Scorer):
    """Calls `function(images, prompts, metadata, **kwargs) -> list of float` of the Python file `path`.

    The attributes `groupwise` and `takes_frames` of the function, where it has them, mean what they do for `Scorer`.

    `key` is the configuration key of the scorer, for messages. Relative paths are from the current directory.

    Raises:
        RewardError: the file or the function is missing, the file fails, or the function does not take these arguments.
    """

    def __init__(self, key: str, path: str, function: str, kwargs: dict[str, object]) -> None:
        self.kwargs = kwargs
        self.function = _function(key, path, function)
        self.groupwise = bool(getattr(self.function, "groupwise", False))
        self.takes_frames = bool(getattr(self.function, "takes_frames", False))
        try:
            inspect.signature(self.function).bind([], [], [], **kwargs)
        except TypeError as error:
            raise RewardError(
                f"{key}.kwargs: {function} in {path} cannot be called as {function}(images, prompts, metadata, "
                f"**kwargs) with kwargs {', '.join(kwargs) or 'empty'} ({error}): change either"
            ) from None

    def __call__(self, images: list[Image.Image], prompts: list[str], metadata: list[Metadata]) -> object:
        return self.function(images, prompts, metadata, **self.kwargs)


def _function(key: str, path: str, function: str) -> Callable[..., object]:
    module = load_module(key, path)
    found: Callable[..., object] | None = getattr(module, function, None)
    if found is None:
        names = [
            n for n, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == module.__name__
        ]
        raise RewardError(
            f"{key}.function={function}: {path} does not define it, only {', '.join(names) or 'no function at all'}; "
            "define it or give another name"
        )
    if not callable(found):
        raise RewardError(f"{key}.function={function}: in {path} it is a {type(found).__name__}; name a function")
    return found


def load_module(key: str, path: str) -> ModuleType:
    """Import the Python file `path`; two files never share a module, and an unchanged file is run once a process."""
    file = Path(path).expanduser().absolute()
    if not file.is_file() or file.suffix != ".py":
        raise RewardError(f"{key}.path={path}: there is no Python file {file}; correct the path")
    digest = hashlib.sha256(str(file).encode() + b"\0" + file.read_bytes()).hexdigest()
    name = f"gerl_custom_scorer_{digest[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None  # there is always a loader for .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up here
    try:
        spec.loader.exec_module(module)
    except Interrupted:
        del sys.modules[name]
        raise
    # The file is the user's: whatever it raises is reported as its failure.
    except Exception as error:
        del sys.modules[name]
        raise RewardError(f"{key}.path={path}: importing it failed with {type(error).__name__}: {error}") from error
    return module
