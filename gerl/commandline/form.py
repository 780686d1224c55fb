"""Check the form of arguments (`key=value`) and of the yaml files of users."""

import difflib
import re
import shlex
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gerl.config import absent, is_foreign, other_name
from gerl.config.bounded_text import check_yaml, read_text
from gerl.config.reading import advice, refusal
from gerl.errors import ConfigError

Nearest = Callable[[str], str | None]


def check_form(arguments: Sequence[str], nearest: Nearest, first: str) -> None:
    """Raise `ConfigError` for the first argument that has dashes, no equals sign, or spaces around it.

    Keys of other programs are one error that lists the replacements. `nearest`: returns the key equal or similar to a
    name, None if there is none. `first`: the key that a bare value may be meant for. Hydra's `~key` is accepted.
    """
    for i, argument in enumerate(arguments):
        before = arguments[i - 1] if i else ""
        after = arguments[i + 1] if i + 1 < len(arguments) else ""
        is_alone = _is_value(after)
        name, equals, value = argument.partition("=")
        if argument.startswith("-"):
            raise ConfigError(_without_dashes(arguments, i, nearest))
        if after == "=":
            rest = arguments[i + 2] if i + 2 < len(arguments) else "VALUE"
            raise ConfigError(f"{name} = {rest}: no spaces around the equals sign, {_write(name, rest)}")
        if (not equals and after.startswith("=")) or (equals and not value and is_alone):
            after_sign = after.removeprefix("=")
            raise ConfigError(f"{argument} {after}: no spaces around the equals sign, {_write(name, after_sign)}")
        if equals and name != name.strip():
            raise ConfigError(f"{argument}: no spaces around the equals sign, {_write(name.strip(), value.strip())}")
        if equals and not name.strip("+~"):
            raise ConfigError(f"{argument}: expected key=value, but there is no key before the equals sign")
        if equals or argument.startswith("~"):
            continue
        if nearest(name) == name:
            after_sign = f"{argument} {after}" if is_alone else argument
            raise ConfigError(f"{after_sign}: expected key=value, {_write(name, after if is_alone else 'VALUE')}")
        key, space, rest = name.partition(" ")
        if space and nearest(key) == key:
            raise ConfigError(f"{argument}: expected key=value, {_write(key, rest)}")
        if _is_assignment(before):
            quoted = shlex.quote(f"{before} {argument}")
            raise ConfigError(f"{argument}: expected key=value; if it belongs to {before}, put quotes: {quoted}")
        example = shlex.quote(f"{first}={argument}")
        raise ConfigError(f"{argument}: expected key=value, such as {example}; --help lists the keys")
    _check_names(arguments, nearest)


def _check_names(arguments: Sequence[str], nearest: Nearest) -> None:
    pairs = [argument.lstrip("+").partition("=") for argument in arguments if not argument.startswith("~")]
    own_of_hydra = ("hydra.", "hydra/")  # a launcher's keys may be called like those of another program
    foreign = {n: value for n, _, value in pairs if not n.startswith(own_of_hydra) and _is_taken(n, nearest)}
    if foreign:
        ours = {name: value for name, _, value in pairs if name not in foreign}
        raise ConfigError(refusal(foreign, ours))


def _is_taken(name: str, nearest: Nearest) -> bool:
    if not is_foreign(name):
        return False
    if absent(name):
        return nearest("trainer.steps") == "trainer.steps"
    return (meant := other_name(name)) is not None and meant == nearest(name)


def _is_assignment(argument: str) -> bool:
    return "=" in argument[1:] and not argument.startswith("-")


def _without_dashes(arguments: Sequence[str], start: int, nearest: Nearest) -> str:
    """Return the sentence for arguments with dashes, from `start` on, with the replacement of each."""
    dashed: list[str] = []
    written: list[str] = []
    foreign: dict[str, str] = {}
    for i, argument in enumerate(arguments[start:], start):
        after = arguments[i + 1] if i + 1 < len(arguments) else ""
        if not argument.startswith("-"):
            continue
        name, equals, value = argument.lstrip("-").partition("=")
        name = name.replace("-", "_")
        is_alone = not equals and _is_value(after)
        text = value if equals else after if is_alone else ""
        if _is_taken(name, nearest):
            values = [] if equals else list(takewhile(_is_value, arguments[i + 1 :]))
            dashed.append(" ".join([argument, *values]))
            several = f"[{','.join(values)}]" if len(values) > 1 else "".join(values)
            foreign[name] = value or several or "true"  # a switch
            continue
        key = nearest(name)
        if key is None and not dashed:
            return f"{argument}: there is no such option; arguments are key=value without dashes, --help lists the keys"
        if key is not None:
            dashed.append(f"{argument} {after}" if is_alone else argument)
            written += [shlex.quote(f"{part}={text or 'VALUE'}") for part in key.split()]
    if not foreign:
        return f"{' '.join(dashed)}: drop the dashes, write {' '.join(written)}; --help lists the keys"
    ours = dict(argument.split("=", 1) for argument in arguments if _is_assignment(argument))
    hint = advice(foreign, ours, first=" ".join(written))
    return f"{' '.join(dashed)}: {'drop the dashes, ' if hint.startswith('write ') else ''}{hint}"


def _is_value(argument: str) -> bool:
    return argument != "" and not _is_assignment(argument) and not argument.startswith("--")


def _write(name: str, value: str) -> str:
    return f"write {shlex.quote(f'{name}={value}')}"


# --- The yaml files of users: read with errors that name line and column; and names near to one that is wrong


def read_yaml(path: Path, where: str) -> DictConfig:
    """Read the keys of a yaml file; raises `ConfigError` beginning with `where`."""
    try:
        check_yaml(read_text(path))
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
    mark = error.problem_mark or error.context_mark
    problem = " ".join((error.problem or error.context or "it is not yaml").split())
    if mark is None:
        return problem
    lines = path.read_text(encoding="utf-8").splitlines()
    if mark.line < len(lines) and lines[mark.line][mark.column :].startswith("\t"):  # the C parser does not name it
        problem = "a tab, where yaml expects spaces"
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}"


def near_names(name: str, names: Sequence[str]) -> list[str]:
    """Return at most three of `names` similar to `name`: by words, else by spelling, or containing it."""
    words = _words(name)
    same = [candidate for candidate in names if words and "".join(words) == "".join(_words(candidate))]
    if same := same or [candidate for candidate in names if words and _has(words, _words(candidate))]:
        return same[:3]
    numbers = {word for word in words if len(word) > 1 and word.isdigit()}  # another number, another thing
    near = [k for k in difflib.get_close_matches(name.lower(), names, n=3) if numbers <= set(_words(k))]
    return near or [candidate for candidate in names if name and name.lower() in candidate][:3]


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z]+|\d+", name.lower())


def _has(words: Sequence[str], name_words: Sequence[str]) -> bool:
    """Whether `name_words` contains all of `words` or words beginning with them, in order."""
    rest = iter(name_words)
    return all(any(other.startswith(word) for other in rest) for word in words)


def either(names: Sequence[str]) -> str:
    """Join names for a sentence: 'a', 'b' or 'c'."""
    *others, last = map(repr, names)
    return f"{', '.join(others)} or {last}" if others else last
