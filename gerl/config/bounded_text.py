"""YAML and JSON of users and of run folders, read in bounded time and memory.

An alias stands for a whole structure, so that ten lines can mean a billion values, and deep nesting exceeds the stack.
Both are refused in the graph of nodes, before values are built.
"""

import errno
import json
import os
import re
import stat
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import ComposerError

DEPTH = 50  # levels of lists and mappings
LARGEST = 500_000  # characters, also with aliases replaced by what they stand for
LARGEST_JSON, LARGEST_LOG = 2**25, 2**28  # bytes; a log is read by lines
LARGE = 1e100  # larger measurements count as damaged: their squares must be finite floats
# raised for values of unexpected types
MALFORMED = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
TOO_DEEP = f"lists and mappings are nested in more than {DEPTH} levels, the most that gerl reads"
TOO_LARGE = f"it has more than {LARGEST} characters with its aliases expanded, the most that gerl reads"


class BoundedLoader(yaml.SafeLoader):
    """A `SafeLoader` that raises `yaml.MarkedYAMLError` for what is too deep or too large."""

    def get_single_node(self) -> yaml.Node | None:
        try:
            root = super().get_single_node()
        except RecursionError:
            raise ComposerError(None, None, TOO_DEEP, self.get_mark()) from None
        if root is not None:
            _measure(root, {})
        return root


def _measure(node: yaml.Node, measured: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """Return the characters and levels of `node` with aliases replaced; `measured`: those of nodes before, by id."""
    if id(node) in measured:
        return measured[id(node)]
    size, levels = 1, 0
    if isinstance(node, yaml.ScalarNode):
        size += len(node.value)
        if not node.value.isascii() and re.search(r"[\ud800-\udfff]", node.value):
            raise ComposerError(None, None, "a surrogate is no character", node.start_mark)
    else:
        measured[id(node)] = 1, DEPTH  # an alias within itself has no end
        for entry in node.value:
            for part in entry if isinstance(entry, tuple) else (entry,):
                its_size, its_levels = _measure(part, measured)
                size, levels = size + its_size, max(levels, its_levels)
        levels += 1
    if levels > DEPTH or size > LARGEST:
        raise ComposerError(None, None, TOO_DEEP if levels > DEPTH else TOO_LARGE, node.start_mark)
    measured[id(node)] = size, levels
    return size, levels


def regular(path: Path, most: int | None = None) -> Path:
    """Return `path` if it is a regular file of at most `most` bytes; raises `OSError`: a device has no end."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    if most is not None and status.st_size > most:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes", str(path))
    return path


def unlinked(path: Path) -> Path:
    """Return the path of a file of a run; raises `OSError` for a link that leads out of its folder."""
    if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(path.parent)):
        raise OSError(errno.EINVAL, "it is a link that leads out of the folder", str(path))
    return path


def read_text(path: Path, errors: str = "strict", most: int = 4 * LARGEST) -> str:
    """Return the UTF-8 text of a regular file of at most `most` bytes; raises `OSError`, `UnicodeDecodeError`."""
    return regular(path, most).read_text(encoding="utf-8", errors=errors)


def read_json(path: Path) -> Any:
    """Read a file of JSON, see `load_json`; raises `OSError`, `ValueError`."""
    return load_json(regular(path, LARGEST_JSON).read_bytes())


def read_log(path: Path) -> list[str]:
    """Return the lines of a log of a run, such as JSON lines; raises `OSError`."""
    return read_text(unlinked(path), "replace", LARGEST_LOG).splitlines()


def load_yaml(text: str) -> Any:
    """Parse YAML of plain values; raises `yaml.YAMLError`, also for what would take too much time or memory."""
    _check_length(text)
    try:
        return yaml.load(text, BoundedLoader)
    except ValueError as error:  # a date or a number that there is not
        raise yaml.YAMLError(str(error)) from None


def read_values(path: Path, errors: str = "strict") -> Any:
    """Read a file of YAML with plain values; raises `OSError`, `UnicodeDecodeError`, `yaml.YAMLError`."""
    return load_yaml(read_text(path, errors))


def check_yaml(text: str) -> None:
    """Raise `yaml.YAMLError` for a text that is no YAML, or is too deep or too large, for readers without limits."""
    _check_length(text)
    yaml.compose(text, BoundedLoader)


def _check_length(text: str) -> None:
    if len(text) > LARGEST:
        raise yaml.YAMLError(TOO_LARGE)


def load_json(text: str | bytes) -> Any:
    """Parse JSON; raises `ValueError`, also for lone surrogates, which no text has, and for too many levels."""
    try:
        value = json.loads(text)
        opened, escape = ((b"[", b"{"), b"\\u") if isinstance(text, bytes) else (("[", "{"), "\\u")
        if sum(map(text.count, opened)) > DEPTH and _levels(value) > DEPTH:  # type: ignore[arg-type]
            raise ValueError(TOO_DEEP)
        if escape in text:  # type: ignore[operator]
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    return value


def parse_json(text: str | bytes) -> Any:
    """Parse JSON that can be written again; raises `ValueError`, also for NaN, see `load_json`."""
    value = load_json(text)
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    return value


def _levels(value: Any) -> int:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if parts is None else 1 + max(map(_levels, parts), default=0)
