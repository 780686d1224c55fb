"""The `key=value` arguments of a command: keys of its own, and those of the configuration that it passes on."""

import difflib
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gerl.config import keys
from gerl.errors import ConfigError

WIDTH = 110  # characters of a line of the help


@dataclass(frozen=True)
class Key:
    """A key of a command's own, and what to say of it; up to the first semicolon, `text` says what it may be.

    read: its value from a text, `ValueError` says what that must be. named: KEY.NAME=VALUE too, any number of them.
    """

    name: str
    text: str
    read: Callable[[str], object] = str
    default: object = None
    required: bool = False
    named: bool = False
    choices: Sequence[str] = ()

    @property
    def advice(self) -> str:
        """An argument as it could be given."""
        return f"{self.name}={self.text.split(';')[0]}"


def to_path(text: str) -> Path:
    """A path."""
    return Path(text).expanduser()


def number(what: str, low: int = 0) -> Callable[[str], int]:
    """A reader of whole numbers from `low` on; `what` they are."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < low:
            raise ValueError(f"it must be {what}")
        return int(text)

    return read


@dataclass(frozen=True)
class Parser:
    """A command as messages call it (`name`) and the help explains it, with its keys.

    passed, blocks: the configuration's keys, and blocks of keys, that are passed on to Hydra. rest: whether everything
    else is.
    """

    name: str
    usage: str
    summary: str
    keys: Sequence[Key]
    passed: Sequence[str] = ()
    blocks: Sequence[str] = ()
    rest: bool = False
    notes: str = ""

    def parse(self, arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
        """Values of all own keys, defaults where they are not given, and the arguments that are passed on.

        The value of a `named` key is a list of (name or None, value), in order. Raises `ConfigError` for what is
        missing, unknown, given twice or has an impossible value.
        """
        own = {key.name: key for key in self.keys}
        values: dict[str, object] = {}
        named: dict[str, list[tuple[str | None, object]]] = {key.name: [] for key in self.keys if key.named}
        overrides: list[str] = []
        for argument in arguments:
            name, equals, text = argument.partition("=")
            base, _, inner = name.partition(".")
            if equals and base in named and (inner or name == base):
                if inner in dict(named[base]):
                    raise ConfigError(f"{name} is given twice: keep one")
                named[base].append((inner or None, _value(own[base], name, text)))
            elif equals and name in own:
                if name in values:
                    raise ConfigError(f"{name} is given twice: keep one")
                values[name] = _value(own[name], name, text)
            elif self.rest or self._is_passed(name.lstrip("+~")):
                overrides.append(argument)
            elif not equals:
                raise ConfigError(f"{argument}: expected key=value; --help lists the keys")
            else:
                raise self._unknown(name.lstrip("+~"))
        for key in self.keys:
            if key.required and key.name not in values:
                raise ConfigError(f"{key.name} is missing: give {key.advice}; --help shows all")
        return {key.name: key.default for key in self.keys} | named | values, overrides

    def _is_passed(self, name: str) -> bool:
        return name in self.passed or ("." in name and name.split(".")[0] in self.blocks)

    def _unknown(self, name: str) -> ConfigError:
        known = [*(key.name for key in self.keys), *self.passed]
        near = difflib.get_close_matches(name, known, n=1)
        blocks = f" and {', '.join(f'{block}.*' for block in self.blocks)}" if self.blocks else ""
        hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known)}{blocks}"
        return ConfigError(f"{name}: {self.name} has no such key; {hint}")

    def help(self) -> str:
        """Every key with its explanation and default, and those of the configuration that are passed on."""
        width = max(len(key.name) for key in self.keys) + 2
        lines = [f"usage: {self.usage}", "", self.summary]
        for key in self.keys:
            default = str(key.default).lower() if isinstance(key.default, bool) else key.default
            text = f"  {key.name:<{width}}{key.text}{'' if default in (None, '') else f' (default: {default})'}"
            lines.append(textwrap.fill(text, WIDTH, subsequent_indent=" " * (width + 2)))
        lines += ["", textwrap.fill(self.notes, WIDTH)] if self.notes else []
        lines += [f"  {name}\n      {f.metadata['help']}" for name, f in keys() if self._is_passed(name)]
        return "\n".join(lines) + "\n"


def _value(key: Key, name: str, text: str) -> object:
    if not text.strip():
        raise ConfigError(f"{name} is empty: give {key.advice}{'' if key.required else ', or leave it out'}")
    if key.choices and text not in key.choices:
        raise ConfigError(f"{name}={text}: choose {' or '.join(key.choices)}")
    try:
        return key.read(text)
    except ValueError as error:
        raise ConfigError(f"{name}={text}: {error}") from None
