"""Atomic writes of files and folders, and log records as values."""

import contextlib
import csv
import hashlib
import io
import logging
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from pydantic import ValidationError
from safetensors import SafetensorError

from gerl.config.bounded_text import regular
from gerl.errors import ConfigError, GerlError


def reason(error: Exception) -> str:
    """Return the message of an error on one line: of an `OSError` without errno and path, of pydantic's the first."""
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": ")
    text = error.strerror if isinstance(error, OSError) else None
    return text or " ".join(str(error).split()) or type(error).__name__


def first_line(error: Exception) -> str:
    """Return the first line of the message of a library's error, or its type."""
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an `OSError` into a `GerlError` that names `path`."""
    try:
        yield
    except OSError as error:
        raise GerlError(f"{path} cannot be written: {reason(error)}; free up space or choose another folder") from error


def write_file(path: Path, content: str | bytes, private: bool = False) -> None:
    """Write `path` atomically, text as UTF-8, readable for others unless `private`. Raises `GerlError` on failure."""
    part = path.with_name(f"{path.name}.{uuid4().hex[:8]}.part")  # other processes may write the same file
    try:
        with writing(path):
            part.touch(0o600 if private else 0o666)
            part.write_bytes(content.encode() if isinstance(content, str) else content)
            os.replace(part, path)
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def is_within(file: Path, folders: str) -> bool:
    """Whether a file, with its links followed, is in one of `folders`, which are separated by commas."""
    places = (Path(folder).expanduser().resolve() for folder in folders.split(",") if folder)
    return any(file.resolve().is_relative_to(place) for place in places)


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a regular file; raises `OSError` for a device or a pipe, which may have no end."""
    with regular(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def csv_text(columns: Sequence[str], rows: Sequence[Mapping[str, object]]) -> str:
    """Format a table with a header as CSV; None is an empty cell, and no text is a formula of a spreadsheet."""
    table = io.StringIO(newline="")
    writer = csv.DictWriter(table, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _inert(value) for name, value in row.items()} for row in rows)
    return table.getvalue()


def _inert(value: object) -> object:
    if not isinstance(value, str) or not value.startswith(("=", "+", "-", "@", "\t", "\r")):
        return value
    return value if re.fullmatch(r"[+-][\d.]+(e[+-]?\d+)?", value, re.ASCII) else f"'{value}"


def finite(value: Any) -> Any:
    """Convert a nested value to JSON's types: None for NaN and infinities, lists for tuples."""
    if isinstance(value, dict):
        return {name: finite(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_atomically(out: Path, fill: Callable[[Path], None]) -> list[Path]:
    """Let `fill` write into a temporary folder inside `out`, then move its files into `out`: no partial file is left.

    Returns the files. Raises `ConfigError` if they cannot be written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".export-", dir=out) as name:
            fill(Path(name))
            files = sorted(path.relative_to(name) for path in Path(name).rglob("*") if path.is_file())
            for file in files:
                (out / file).parent.mkdir(parents=True, exist_ok=True)
                (Path(name) / file).replace(out / file)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"out={out}: the files cannot be written ({reason(error)}); choose another folder") from None
    return [out / file for file in files]


# --- Log records of a worker as values: its process has no visible log, so they are returned with its results


def pass_on_logs(name: str, level: int, say: Callable[[str], None]) -> None:
    """Pass messages of the loggers below `name`, from `level` on, to `say` until the process ends."""
    logger, handler = logging.getLogger(name), logging.Handler(level)
    handler.emit = lambda record: say(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(level)


@contextmanager
def capture_logs(name: str, level: int) -> Iterator[list[str]]:
    """Collect messages of the loggers below `name`, from `level` on, instead of emitting them."""
    messages: list[str] = []
    logger, handler = logging.getLogger(name), logging.Handler(level)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]
