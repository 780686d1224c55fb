"""The `key=value` arguments of a command: keys of its own, and those of the configuration that it passes on."""

import difflib
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, get_args, get_origin, get_type_hints

from gerl.commandline.form import check_form, either, near_names
from gerl.config import keys, nearest_key
from gerl.errors import ConfigError

T = TypeVar("T")
Option = Field[Any]  # a key of a command
WIDTH = 110  # characters of a line of the help
FOLDER_HELP = "  --config-dir DIR  a folder with your own experiments, for experiment=NAME"


def key(
    text: str,
    default: Any = None,
    *,
    required: bool = False,
    unit: str = "",
    low: int = 0,
    also: Mapping[str, str] | None = None,
) -> Any:
    """A field that is a key of a command, whose type is read from a text: str, Path, bool, int or a Literal.

    text: what it is for; up to the first semicolon, what it may be. unit, low: of an int, what it is, and from where
    on; of a choice, what to take instead. also: other words for a value. A key whose default is a list or dict is
    named: KEY.NAME=VALUE too, any number of them.
    """
    named = isinstance(default, list | dict)
    value: dict[str, Any] = {"default_factory": type(default)} if named else {"default": default}
    return field(**value, metadata={"help": text, "required": required, "unit": unit, "low": low, "also": also or {}})


def typed(option: Option, hint: object, text: str) -> object:
    """Convert a text to the value of a key of type `hint`; raises `ValueError` with the expected type."""
    kind = next((part for part in get_args(hint) if type(None) in get_args(hint)), hint)  # X of X | None
    choices = get_args(kind) if get_origin(kind) is Literal else ("false", "true") if kind is bool else ()
    text = option.metadata["also"].get(text, text)
    if choices and text not in choices:
        near = near_names(text, choices)
        unit = option.metadata["unit"] and f"; {option.metadata['unit']}"
        raise ValueError(f"did you mean {either(near)}?" if near else f"choose {' or '.join(choices)}{unit}")
    if kind is int and (not text.isdecimal() or int(text) < option.metadata["low"]):
        raise ValueError(f"it must be {option.metadata['unit']}")
    if kind is bool:
        return text == "true"
    return Path(text).expanduser() if kind is Path else int(text) if kind is int else text


@dataclass(frozen=True)
class Parser(Generic[T]):
    """A command as messages call it (`name`) and the help explains it; `options` is the dataclass of its keys.

    program, usage: the words that start it, and the arguments behind them, in the first line of the help.
    passed, blocks: the configuration's keys, and blocks of keys, that are passed on to Hydra. rest: whether everything
    else is. bare: the key that an argument without an equals sign stands for. read: a value from field, type and text.
    """

    name: str
    program: str
    usage: str
    summary: str
    options: Callable[..., T]
    passed: Sequence[str] = ()
    blocks: Sequence[str] = ()
    rest: bool = False
    bare: str = ""
    notes: str = ""
    read: Callable[[Option, object, str], object] = typed

    def parse(self, arguments: Sequence[str]) -> tuple[T, list[str]]:
        """Return the command's own keys and the arguments that are passed on; raises `ConfigError`."""
        values, overrides = self.values(arguments)
        return self.options(**values), overrides

    def values(self, arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
        """As `parse`, but the keys that are given, by name; a named one as a list of (NAME or None, value)."""
        options = {option.name: option for option in self._keys()}
        entries_of: dict[str, list[tuple[str | None, object]]] = {}
        overrides: list[str] = []
        if self.composes:
            from gerl.commandline.composition import OUT, with_folder, without_options  # in here: it imports Hydra

            arguments = without_options(arguments)
            if self.rest and OUT not in options:
                arguments = with_folder(arguments)
        # one beside an option with dashes may be the value of that
        if not any(a.startswith("-") and "=" not in a for a in arguments):
            arguments = [f"{self.bare}={a}" if self._is_bare(a) else a for a in arguments]
        check_form(arguments, self._nearest, "experiment" if self.rest else self._keys()[0].name)
        for argument in arguments:
            name, equals, text = argument.partition("=")
            base, _, inner = name.partition(".")
            if equals and base in options and (name == base or (inner and _is_named(options[base]))):
                entries = entries_of.setdefault(base, [])
                if inner in dict(entries) or (entries and not _is_named(options[base])):
                    raise ConfigError(f"{name} is given twice: keep one")
                entries.append((inner or None, self._value(options[base], name, text)))
            elif self.rest or self._is_passed(name.lstrip("+~")):
                overrides.append(argument)
            else:
                name = name.lstrip("+~")
                near, blocks = self._nearest(name), ", ".join(f"{block}.*" for block in self.blocks)
                there = f"it has {', '.join(self._known())}" + (f" and {blocks}" if blocks else "")
                hint = f"did you mean {near!r}?" if near else there
                raise ConfigError(f"{name}: {self.name} has no such key; {hint}")
        for option in options.values():
            if option.metadata["required"] and option.name not in entries_of:
                raise ConfigError(f"{option.name} is missing: give {_advice(option)}; --help shows all")
        values = {name: entries if _is_named(options[name]) else entries[0][1] for name, entries in entries_of.items()}
        return values, overrides

    @property
    def composes(self) -> bool:
        """Whether it takes an experiment."""
        return self.rest or "experiment" in self.passed

    def _keys(self) -> list[Option]:
        options: tuple[Option, ...] = fields(self.options)  # type: ignore[arg-type]
        return sorted(options, key=lambda option: option.name != self.bare)  # the bare one first, also of a subclass

    def _value(self, option: Option, name: str, text: str) -> object:
        if not text.strip():
            leave = "" if option.metadata["required"] else ", or omit it"
            raise ConfigError(f"{name} is empty: give {_advice(option)}{leave}")
        try:
            return self.read(option, get_type_hints(self.options)[option.name], text)
        except ValueError as error:
            raise ConfigError(f"{name}={text}: {error}") from None

    def _is_passed(self, name: str) -> bool:
        return name in self.passed or ("." in name and name.split(".")[0] in self.blocks)

    def _is_bare(self, argument: str) -> bool:
        """Whether an argument is the value of `bare` alone; a folder's name may have an equals sign in it."""
        if argument in (option.name for option in self._keys()):
            return False
        return bool(self.bare) and argument[:1] not in "-=" and ("=" not in argument or Path(argument).exists())

    def _known(self) -> list[str]:
        return [*(option.name for option in self._keys()), *self.passed]

    def _nearest(self, name: str) -> str | None:
        near = difflib.get_close_matches(name, self._known(), n=1)
        if near or not (self.blocks or self.rest):
            return near[0] if near else None
        nearest = nearest_key(name)
        return nearest if nearest and (self.rest or self._is_passed(nearest)) else None

    def help(self, program: str | None = None) -> str:
        """Explain every key, and those that are passed on; `program`: the words that started the command, if others."""
        width = max(len(option.name) for option in self._keys()) + 2
        lines = [f"usage: {program or self.program} {self.usage}", "", self.summary]
        for option in self._keys():
            default = str(option.default).lower() if isinstance(option.default, bool) else option.default
            shown = "" if default in (None, MISSING) else f" (default: {default})"
            text = f"  {option.name:<{width}}{option.metadata['help']}{shown}"
            lines.append(textwrap.fill(text, WIDTH, subsequent_indent=" " * (width + 2)))
        lines += [FOLDER_HELP] if self.composes else []
        lines += ["", textwrap.fill(self.notes, WIDTH)] if self.notes else []
        lines += [f"  {name}\n      {f.metadata['help']}" for name, f in keys() if self._is_passed(name)]
        return "\n".join(lines) + "\n"


def _is_named(option: Option) -> bool:
    return option.default is MISSING


def _advice(option: Option) -> str:
    return f"{option.name}={option.metadata['help'].split(';')[0]}"
