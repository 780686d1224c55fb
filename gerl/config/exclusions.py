"""Keys that exclude each other: the table `exclusions.yaml`, checked on every configuration and shown in the docs."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gerl.config.schema import shown
from gerl.errors import ConfigError

MISSING = object()  # value of a key that the selected algorithm does not read
CONDITION = re.compile(r"([\w.]+)(?:(!=|=|<|>)(.+))?")


@dataclass(frozen=True)
class Exclusion:
    """A combination of key values that is not allowed.

    `key` and `beside` are conditions: `block.key` (is set), `block.key=VALUE`, `!=`, `<` and `>`; `=*` is any value;
    `needs.FACT` is a field of the algorithm's `Needs`. `beside` may combine conditions with `&`, and alternatives with
    `|`. In `reason`, `{block.key}` is replaced by the value.
    """

    key: str
    beside: str
    reason: str
    remedy: str

    def applies(self, parts: Mapping[str, Any]) -> bool:
        """Whether the configuration with these `parts` (by name) is excluded."""
        beside = (all(_holds(c, parts) for c in way.split(" & ")) for way in self.beside.split(" | "))
        return _holds(self.key, parts) and any(beside)

    def sentence(self, parts: Mapping[str, Any]) -> str:
        """Return the error message."""
        name, operator, _ = _parsed(self.key)
        if name == "actor.updates":
            setting = parts["actor"].said  # the keys that were set
        else:
            setting = f"{name}={shown(_value(name, parts)).strip(chr(39))}" if operator else name
        return f"{setting}: {self.reason.format_map(parts)}; {self.remedy}"


def check_exclusions(rows: Iterable[Exclusion], parts: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for the first row that excludes the configuration with these `parts` (by name)."""
    for row in rows:
        if row.applies(parts):
            raise ConfigError(row.sentence(parts))


def _parsed(condition: str) -> tuple[str, str, str]:
    match = CONDITION.fullmatch(condition)
    assert match is not None, condition
    return match[1], match[2] or "", match[3] or ""


def _value(name: str, parts: Mapping[str, Any]) -> Any:
    first, *rest = name.split(".")
    value = parts.get(first, MISSING)
    for attribute in rest:
        value = getattr(value, attribute, MISSING)
    return value


def _holds(condition: str, parts: Mapping[str, Any]) -> bool:
    name, operator, text = _parsed(condition)
    value = _value(name, parts)
    if value is MISSING or not operator:
        return value is not MISSING and bool(value)
    if operator in "<>":
        return bool(value < float(text) if operator == "<" else value > float(text))
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    same = text in ("*", shown(value).strip("'")) or (is_number and text != "null" and float(text) == value)
    return same == (operator == "=")


_TABLE = yaml.load(
    Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader)
)
# within the blocks `model` and `sampling`, and across blocks
MODEL, SAMPLING, EXCLUSIONS = (tuple(Exclusion(**row) for row in _TABLE[part]) for part in ("model", "sampling", "run"))


def as_markdown(rows: Iterable[Exclusion]) -> str:
    """Return a table of `rows` for the documentation."""
    lines = ["| key | not beside | because |", "|---|---|---|"]
    for row in rows:
        beside = re.sub(r"[^ &|]+", lambda match: f"`{match[0]}`", row.beside)
        beside = beside.replace(" & ", " and ").replace(" | ", " or ")
        sentence = f"{row.reason}; {row.remedy}".replace("{algorithm.name}", "the algorithm")
        sentence = re.sub(r"(?:[\w.]+=)?\{([\w.]+)\}", r"this \1", sentence)
        lines.append(f"| `{row.key}` | {beside} | {sentence} |")
    return "\n".join(lines) + "\n"
