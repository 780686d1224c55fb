"""Prompts from Python: a data set, a list or a function that makes one, named `MODULE:NAME` or `FILE.py:NAME`."""

import contextlib
import hashlib
import importlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from gerl.config.user_files import check_trusted, load_module, neighbours_of, raised_at
from gerl.data.tables import Row, split_row
from gerl.errors import DataError
from gerl.protocol import Prompt

MOST_ROWS = 10**6  # of Python objects, which may go on for ever: they take seconds and a gigabyte
KIND = "expected a data set with __len__ and __getitem__, an iterable, or a function or class that returns one"


class MapStyle(Protocol):
    """A data set whose items are found by their number, as of torch."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def items(prompts: object) -> Iterator[object]:
    """Iterate over a list, an iterable or a map-style data set (`__len__` and `__getitem__`, as of torch).

    Raises `DataError` for other objects, and for more than `MOST_ROWS` items.
    """
    if isinstance(prompts, Iterable) and not isinstance(prompts, str | bytes):
        for count, item in enumerate(prompts):
            if count == MOST_ROWS:
                raise DataError(
                    f"it gives more than {MOST_ROWS:,} prompts, and may have no end: give as many as a run needs, "
                    "such as with itertools.islice, or write them into a file"
                )
            yield item
    elif hasattr(prompts, "__getitem__") and hasattr(prompts, "__len__") and not isinstance(prompts, str | bytes):
        for i in range(len(prompts)):  # not by iterating: a data set need not raise IndexError at its end
            yield prompts[i]
    else:
        raise DataError(f"{type(prompts).__name__}: {KIND}")


def row_of(prompt: object, i: int, prompt_key: str = "prompt") -> dict[str, Any]:
    """Return a prompt as a row; raises `DataError` unless it is a string or a dictionary."""
    if isinstance(prompt, str):
        return {prompt_key: prompt}
    if isinstance(prompt, Mapping):
        return dict(prompt)
    raise DataError(
        f"prompt {i} is {type(prompt).__name__}: expected a string, or a dictionary with the key {prompt_key}"
    )


def as_lines(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return rows as lines of JSON; raises `DataError` for values that JSON does not have."""
    lines = []
    for i, row in enumerate(rows):
        try:
            lines.append(json.dumps(row, ensure_ascii=False))
        except (TypeError, ValueError) as error:
            raise DataError(
                f"columns of prompt {i} must be strings and numbers ({error}): give images as file paths"
            ) from None
    return lines


def code_rows(path: str, prompt_key: str, kwargs: Mapping[str, Any]) -> list[tuple[str, Prompt]]:
    """Return the prompts of `path` with their positions, as a .jsonl file of its rows would give them.

    A function or class is called with `kwargs`. Raises `DataError`: it cannot be imported or called, or a row is none.
    """
    lines = _lines(path, prompt_key, kwargs)
    rows: list[Row] = [json.loads(line) for line in lines]
    return [(f"row {n}", Prompt(n - 1, *split_row(row, prompt_key, f"row {n}"))) for n, row in enumerate(rows, start=1)]


def code_digest(path: str, prompt_key: str, kwargs: Mapping[str, Any]) -> str:
    """Return the SHA-256 (hex) of the rows of `path`. Errors as in `code_rows`."""
    return hashlib.sha256("\n".join(_lines(path, prompt_key, kwargs)).encode()).hexdigest()


def folder_of(path: str) -> Path:
    """Return the folder to which paths in the rows are relative: that of FILE.py, or the current one."""
    file = path.rpartition(":")[0]
    return Path(file).expanduser().absolute().parent if file.endswith(".py") else Path.cwd()


def _lines(path: str, prompt_key: str, kwargs: Mapping[str, Any]) -> Sequence[str]:
    module, source = _found(path)
    try:
        with neighbours_of(module) if path.rpartition(":")[0].endswith(".py") else contextlib.nullcontext():
            made = source(**kwargs) if callable(source) else source
            lines = as_lines(row_of(item, i, prompt_key) for i, item in enumerate(items(made)))
    except DataError:
        raise
    # any exception of the user's code, including sys.exit, is reported as its failure
    except (Exception, SystemExit) as error:
        file = path.rpartition(":")[0]
        where = raised_at(error, file) if file.endswith(".py") else ""
        raise DataError(f"it raised {type(error).__name__}: {error}{where}") from error
    if not callable(source) and kwargs:
        raise DataError(f"kwargs are given, and {path.rpartition(':')[2]} is not a function or class: remove them")
    if not lines:
        raise DataError("it has no prompts: it must have at least one")
    return lines


def _found(path: str) -> tuple[ModuleType, Any]:
    place, _, name = path.rpartition(":")
    if place.endswith(".py"):
        module = load_module("file", place, DataError)
    else:
        check_trusted("file", path)
        if not {"", str(Path.cwd())} & set(sys.path):  # as with python -m
            sys.path.append(str(Path.cwd()))
        try:
            module = importlib.import_module(place)
        except ImportError as error:
            raise DataError(
                f"the module {place} cannot be imported ({error}): install it, or name its file, FILE.py:{name}"
            ) from error
    if not hasattr(module, name):
        raise DataError(f"{place} has no {name}: correct the part after the colon")
    return module, getattr(module, name)
