"""Blocks of the configuration and their keys, each with a default, an explanation and a range."""

import dataclasses
import math
import types
from collections.abc import Mapping
from dataclasses import field
from functools import partial
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import ConfigDict

from gerl.errors import ConfigError

DEEPEST = 32  # levels of nested mappings and lists in a value
SHOWN = 200  # characters of a value quoted in a message


def key(
    default: Any,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    often: bool = False,
) -> Any:
    """Define a key with its default, explanation and range (`above` is exclusive); `often`: plain `--help` lists it."""
    metadata = {"help": help, "low": low, "high": high, "above": above, "often": often}
    if isinstance(default, dict | list):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


main_key = partial(key, often=True)  # a frequently used key, listed by plain `--help`


def is_flat(value: object, levels: int = DEEPEST) -> bool:
    """Whether at most `levels` mappings and lists are nested, since copying and serialising a value recurses."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else None
    return inner is None or (levels > 0 and all(is_flat(part, levels - 1) for part in inner))


KINDS: dict[Any, str] = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
SPELLED = {"true": True, "false": False}


def fits(value: object, kind: Any, spelled: bool = False) -> bool:
    """Whether a value matches the annotation `kind`. Booleans and numbers are not interchangeable.

    spelled: also accept strings for numbers and booleans, floats such as 1e3 for integers, and a mapping for a block.
    """
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return any(fits(value, part, spelled) for part in parts)
    if origin is Literal:
        return value in parts and not (isinstance(value, bool) and True not in parts)
    if origin is list:
        return isinstance(value, list | tuple) and all(fits(part, parts[0], spelled) for part in value)
    if origin is dict:
        return isinstance(value, Mapping) and all(fits(part, parts[1], spelled) for part in value.values())
    if kind is int or kind is float:
        if spelled and isinstance(value, str):
            return _number(value) is not None
        whole = spelled and isinstance(value, float) and value.is_integer()
        return (isinstance(value, kind | int) and not isinstance(value, bool)) or whole
    if kind is bool:
        return isinstance(value, bool) or (spelled and isinstance(value, str) and value.lower() in SPELLED)
    if kind in (str, type(None)):
        return isinstance(value, kind)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return isinstance(value, kind) or (spelled and isinstance(value, Mapping))
    return True  # Any, and kinds with separate checks


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def kind_words(kind: Any) -> str:
    """Describe an annotation in a message."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return " or ".join("null" if part is type(None) else kind_words(part) for part in parts)
    if origin is Literal:
        *others, last = map(repr, parts)
        return f"{', '.join(others)} or {last}" if others else last
    if origin is list:
        return "a list, such as [1,2]" if parts[0] in (int, float) else f"a list, each {kind_words(parts[0])}"
    return "a dictionary, such as {NAME: VALUE}" if origin is dict else KINDS.get(kind, "a value of another kind")


def unfit(value: object, f: "dataclasses.Field[Any]", spelled: bool = False) -> str:
    """Describe the values that the key `f` accepts; empty if `value` is one of them. `spelled`: as in `fits`."""
    if not fits(value, f.type, spelled):
        return kind_words(f.type)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    if not math.isfinite(value):
        return "a finite number"
    low, high, above = (f.metadata.get(bound) for bound in ("low", "high", "above"))
    if low is not None and value < low:
        return f"at least {low}"
    if high is not None and value > high:
        return f"at most {high}"
    return f"greater than {above}" if above is not None and value <= above else ""


def shown(value: object) -> str:
    """Format a value as on the command line, on one line, truncated if long."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # thousands of digits, or too deeply nested lists
        return f"{type(value).__name__} without end"
    return text if len(text) <= SHOWN else f"{text[: SHOWN // 2]}...{text[-SHOWN // 4 :]}"


def resolved_fields(block: Any) -> "tuple[dataclasses.Field[Any], ...]":
    """Return the fields of a block, whose annotations may be strings (`from __future__ import annotations`)."""
    fields = dataclasses.fields(block)
    if any(isinstance(f.type, str) for f in fields):
        hints = get_type_hints(block)
        for f in fields:
            f.type = hints[f.name]
    return fields


class Block:
    """Base of blocks; validates the ranges given to `key`. Subclasses check relations of keys in `check`."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    def __post_init__(self) -> None:
        for f in resolved_fields(type(self)):
            value = getattr(self, f.name)
            self._check_form(f.name, value)
            if wanted := unfit(value, f):
                raise ConfigError(f"{self._path(f.name)}={shown(value)}: it must be {wanted}")
        self.check()

    def _check_form(self, name: str, value: object) -> None:
        if isinstance(value, int) and abs(value) >= 2**64:
            raise ConfigError(f"{self._path(name)}={shown(value)}: it must be less than 2**64")
        if isinstance(value, str) and any(c < " " or c == "\x7f" or "\ud800" <= c <= "\udfff" for c in value):
            raise ConfigError(f"{self._path(name)}={shown(value)}: it contains a control character, remove it")
        if not is_flat(value):
            raise ConfigError(f"{self._path(name)} has more than {DEEPEST} nested mappings or lists: use fewer")

    def _path(self, name: str) -> str:
        block = type(self).__name__.removesuffix("Config").lower()
        return f"{'reward.scorers.NAME' if block == 'scorer' else block}.{name}"

    def check(self) -> None:
        """Raise `ConfigError` if keys of the block contradict each other."""
