"""The yaml files of users: read with errors that name line and column; and names near to one that is wrong."""

import difflib
import re
from collections.abc import Sequence
from pathlib import Path

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gerl.errors import ConfigError


def read_yaml(path: Path, where: str) -> DictConfig:
    """The keys in a yaml file; raises `ConfigError` beginning with `where`."""
    try:
        content = OmegaConf.load(path)
    except yaml.MarkedYAMLError as error:
        raise ConfigError(f"{where}: {_place(error, path)}; correct it there") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: it is not UTF-8 text (byte {error.start}): save it as UTF-8") from None
    except (yaml.YAMLError, OSError, ValueError, OmegaConfBaseException) as error:
        raise ConfigError(f"{where}: it is not a valid yaml file ({' '.join(str(error).split())})") from None
    if not isinstance(content, DictConfig):
        raise ConfigError(f"{where}: expected blocks of keys, such as 'trainer: {{steps: 5}}', got a list")
    return content


def _place(error: yaml.MarkedYAMLError, path: Path) -> str:
    """Line, column and what is wrong there."""
    mark = error.problem_mark or error.context_mark
    problem = " ".join((error.problem or error.context or "it is not yaml").split())
    if mark is not None and _character(path, mark.line, mark.column) == "\t":  # the parser in C does not name it
        problem = "a tab, where yaml expects spaces"
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}" if mark else problem


def _character(path: Path, line: int, column: int) -> str:
    lines = path.read_text(encoding="utf-8").splitlines()
    return lines[line][column : column + 1] if line < len(lines) else ""


def near_names(name: str, names: Sequence[str]) -> list[str]:
    """At most three of `names` that are near to `name`: by its words, else spelt alike, or that it is a part of."""
    words = _words(name)
    same = [known for known in names if words and "".join(words) == "".join(_words(known))]
    if same := same or [known for known in names if words and _has(words, _words(known))]:
        return same[:3]
    numbers = {word for word in words if len(word) > 1 and word.isdigit()}  # another number is another thing
    near = [k for k in difflib.get_close_matches(name.lower(), names, n=3) if numbers <= set(_words(k))]
    return near or [known for known in names if name and name.lower() in known][:3]


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z]+|\d+", name.lower())


def _has(words: Sequence[str], known: Sequence[str]) -> bool:
    """Whether `known` has all of `words`, or words that begin so, in their order."""
    rest = iter(known)
    return all(any(other.startswith(word) for other in rest) for word in words)


def either(names: Sequence[str]) -> str:
    """Names as a sentence offers them: 'a', 'b' or 'c'."""
    *others, last = map(repr, names)
    return f"{', '.join(others)} or {last}" if others else last
