"""Python files of the user, imported by path: rewards and algorithms."""

import contextlib
import hashlib
import importlib
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from gerl.errors import GerlError


def absolute(path: str) -> Path:
    """Return the absolute path of a file of the user."""
    return Path(path).expanduser().absolute()


def source_of(key: str, path: str, error_type: type[GerlError]) -> bytes:
    """Return the text of the Python file `path`. Raises `error_type`, naming the key `key`, if it does not exist."""
    file = absolute(path)
    if not file.is_file() or file.suffix != ".py":
        raise error_type(f"{key}={path}: there is no Python file {file}; correct the path")
    return file.read_bytes()


def load_module(key: str, path: str, error_type: type[GerlError], source: bytes | None = None) -> ModuleType:
    """Import a Python file, or its text `source`, once per process if unchanged. Raises `error_type` naming `key`."""
    file = absolute(path)
    source = source_of(key, path, error_type) if source is None else source
    digest = hashlib.sha256(str(file).encode() + b"\0" + source).hexdigest()
    name = f"gerl_user_file_{digest[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    module = ModuleType(name)
    module.__file__ = str(file)
    sys.modules[name] = module  # dataclasses look up a class's module here
    try:
        with neighbours_of(file):
            exec(compile(source, str(file), "exec"), module.__dict__)
    # any exception of the user's file, including sys.exit, is reported as its failure
    except BaseException as error:
        del sys.modules[name]
        if not isinstance(error, Exception | SystemExit):
            raise
        what = f"{type(error).__name__}: {error}{raised_at(error, path)}"
        raise error_type(f"{key}={path}: importing it failed with {what}") from error
    return module


@contextlib.contextmanager
def neighbours_of(file: Path) -> Iterator[None]:
    """Let imports find the modules beside `file`, after all others; those of another folder may have the same names."""
    before, folder, writes = set(sys.modules), str(file.parent), sys.dont_write_bytecode
    sys.path.append(folder)
    sys.dont_write_bytecode = True
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(folder)
        sys.dont_write_bytecode = writes
        for name in set(sys.modules) - before:
            origin = getattr(sys.modules[name], "__file__", None)
            if not name.startswith("gerl_user_file_") and origin and file.parent in Path(origin).parents:
                del sys.modules[name]


def raised_at(error: BaseException, path: str) -> str:
    """Return ` (PATH, line N: code)` for the last line of the file `path` in the traceback; empty if not in it."""
    own = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == absolute(path)]
    return f" ({path}, line {own[-1].lineno}: {own[-1].line})" if own else ""
