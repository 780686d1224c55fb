"""Python files of the user, imported by path: rewards, algorithms and prompts; and which code may run at all.

Commands that look at a run, which somebody else may have made, run within `only_typed`: all that could run code that
settings name asks `check_trusted` first.
"""

import contextlib
import hashlib
import importlib
import os
import sys
import traceback
from collections.abc import Collection, Iterator
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType

from gerl.errors import GerlError, TrustError

PREFIX = "gerl_user_file_"  # of the names of their modules


def absolute(path: str) -> Path:
    """Return the absolute path of a file of the user."""
    return Path(path).expanduser().absolute()


# --- Trust in code that the settings of a run name

_typed: ContextVar[frozenset[str] | None] = ContextVar("gerl_typed", default=None)  # None: all code is trusted


@contextlib.contextmanager
def only_typed(texts: Collection[str] | None) -> Iterator[None]:
    """Within the block, run only code whose path is one of the `texts` that the user typed; None: any code."""
    if texts is None:
        yield
        return
    paths = {place for text in texts if (place := text.rpartition(":")[0]).endswith(".py")}  # FILE.py:NAME
    before = _typed.set(frozenset({*texts, *map(_place, {*texts, *paths})}))
    try:
        yield
    finally:
        _typed.reset(before)


def is_trusted(text: object) -> bool:
    """Whether a value of a run's settings, such as the path of a file, may be used for more than to be shown."""
    typed = _typed.get()
    return typed is None or not isinstance(text, str) or text in typed or _place(text) in typed


def _place(text: str) -> str:
    return os.path.abspath(os.path.expanduser(text))  # any text: those of pathlib may raise


def check_trusted(key: str, path: str, *files: Path) -> None:
    """Raise `TrustError`, with the SHA-256 of the `files`, if `path` of `key` is code that the user did not type."""
    if is_trusted(path):
        return
    digests = [f"{file} (SHA-256 {_digest(file)})" for file in files]
    raise TrustError(
        f"{key}={path}: gerl runs code and contacts servers that a run names only if you trust them: read "
        f"{' and '.join(digests) or 'it'}, then add trust=true, or pass {key}={path} yourself"
    )


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else "unknown, the file is missing"


# --- Importing a file


def source_of(key: str, path: str, error_type: type[GerlError]) -> bytes:
    """Return the text of the Python file `path`. Raises `error_type`, naming the key `key`, if it does not exist."""
    file = absolute(path)
    if not file.is_file() or file.suffix != ".py":
        raise error_type(f"{key}={path}: there is no Python file {file}; correct the path")
    return file.read_bytes()


def load_module(key: str, path: str, error_type: type[GerlError], source: bytes | None = None) -> ModuleType:
    """Import a Python file, or its text `source`, once per process if unchanged. Raises `error_type` naming `key`."""
    file = absolute(path)
    check_trusted(key, path, file)
    source = source_of(key, path, error_type) if source is None else source
    digest = hashlib.sha256(str(file).encode() + b"\0" + source).hexdigest()
    name = f"{PREFIX}{digest[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    module = ModuleType(name)
    module.__file__ = str(file)
    sys.modules[name] = module  # dataclasses look up a class's module here
    try:
        importlib.invalidate_caches()
        with neighbours_of(module):
            exec(compile(source, str(file), "exec"), module.__dict__)
    # any exception of the user's file, including sys.exit, is reported as its failure
    except BaseException as error:
        del sys.modules[name]
        if not isinstance(error, Exception | SystemExit):
            raise
        what = f"{type(error).__name__}: {error}{raised_at(error, path)}"
        raise error_type(f"{key}={path}: importing it failed with {what}") from error
    return module


_neighbours: dict[str, dict[str, ModuleType]] = {}  # modules beside a user's file, by the name of its module


@contextlib.contextmanager
def neighbours_of(module: ModuleType) -> Iterator[None]:
    """Let imports find the modules beside the file of `module`, after all others, while it is imported or called.

    Those of another file may have the same names, so they are in `sys.modules` within the block only.
    """
    folder, neighbours = Path(str(module.__file__)).parent, _neighbours.setdefault(module.__name__, {})
    others = {name: sys.modules.get(name) for name in neighbours}
    sys.modules.update(neighbours)
    before, writes = set(sys.modules), sys.dont_write_bytecode
    sys.path.append(str(folder))
    sys.dont_write_bytecode = True
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        sys.dont_write_bytecode = writes
        for name in set(sys.modules) - before:
            origin = getattr(sys.modules[name], "__file__", None)
            if not name.startswith(PREFIX) and origin and folder in Path(origin).parents:
                neighbours[name] = sys.modules[name]
        for name in neighbours:
            sys.modules.pop(name, None)
        sys.modules.update({name: other for name, other in others.items() if other is not None})


def raised_at(error: BaseException, path: str) -> str:
    """Return ` (PATH, line N: code)` for the last line of the file `path` in the traceback; empty if not in it."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == absolute(path)]
    return f" ({path}, line {frames[-1].lineno}: {frames[-1].line})" if frames else ""
