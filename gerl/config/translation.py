"""Keys of other programs, translated: gerl's keys with values that mean the same, or why there are none.

The names are in `elsewhere`, the values in `other_values`, and what takes more than a table in `rules`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gerl.config.elsewhere import absent, elsewhere, known_as
from gerl.config.other_values import FLAG, SAID, VALUES, Why
from gerl.config.rules import RULES, Given, plain
from gerl.config.schema import fits, kind_words, shown

OPEN = "VALUE"  # in the place of a value that is not known
CHOSEN = ("algorithm", "experiment", "hydra.run.dir")
Fields = Mapping[str, Any]  # the fields of gerl's keys by name


@dataclass
class Answer:
    """Lines to write for some keys: gerl's keys with their values, `VALUE` where one is not known; and why."""

    written: dict[str, Any] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)  # by the key of the other program, or by gerl's
    idle: list[str] = field(default_factory=list)  # keys that need nothing here


def answer(given: Mapping[str, Any], own: Mapping[str, Any], fields: Fields) -> Answer:
    """Answer the keys of other programs in `given`, beside gerl's `own`; `fields`: all of gerl's keys."""
    found, everything = Answer(), Given(given)
    sources: dict[str, str] = {}
    for name, value in given.items():
        if reason := absent(name):
            found.why[name] = reason
            continue
        lines = _lines(name, value, everything, fields, found)
        if not lines and name not in found.why:
            found.idle.append(name)
        for key, meant in lines.items():
            before = found.written.get(key, own.get(key, meant))
            if key in own and plain(own[key]) != plain(meant):
                found.why[name] = f"{key}={_text(own[key])} is already given"
            elif plain(before) != plain(meant) and OPEN not in (before, meant):
                found.written[key] = OPEN
                found.why[key] = f"{sources[key]} and {name} mean the same; choose one value"
            elif before == OPEN or key not in found.written:
                found.written[key] = meant
                sources[key] = name
    return found


def _lines(name: str, value: Any, given: Given, fields: Fields, found: Answer) -> dict[str, Any]:
    """gerl's keys and values for one key; why a value is open is noted in `found`."""
    end = known_as(name) or ""
    meaning = (elsewhere(name, fields) or "").split()
    text = str(value).lower()
    result: Any = RULES[end](value, given) if end in RULES else None
    result = FLAG.get(end, {}).get(text) if result is None else result
    result = SAID.get(end) if result is None else result
    if isinstance(result, str):
        return dict(line.split("=", 1) for line in re.split(r" (?=[a-z_.]+=)", result) if line)
    if isinstance(result, Why):
        return _open(name, value, result, found)
    lines = result if isinstance(result, dict) else {key: value for key in meaning}
    translated: dict[str, Any] = {}
    for key, meant in lines.items():
        other = VALUES.get(key, {}).get(str(meant).lower()) if isinstance(meant, str | bool | None) else None
        if isinstance(other, Why):
            translated |= _open(name, meant, Why(other.text, other.key or key), found)
            continue
        meant = _as_spelt(key, meant, fields) if other is None else other
        if reason := unfit(key, meant, fields):
            translated |= _open(name, meant, Why(f"{OPEN} is {reason}, and {name} is {_text(meant)}", key), found)
        else:
            translated[key] = meant
    return translated


def _as_spelt(key: str, value: Any, fields: Fields) -> Any:
    """A choice as gerl spells it: other programs have capitals in some."""
    if key in fields and isinstance(value, str) and unfit(key, value, fields) and not unfit(key, value.lower(), fields):
        return value.lower()
    return value


def _open(name: str, value: Any, why: Why, found: Answer) -> dict[str, Any]:
    found.why[name] = why.text.replace("{}", _text(value))
    return {why.key: OPEN} if why.key else {}


def unfit(key: str, value: Any, fields: Fields) -> str:
    """In words, what `key` takes, where `value` is none of that; empty where it may be."""
    if key in CHOSEN:
        return "" if isinstance(value, str) and value.strip() else "a name"
    if key.startswith("sampling.call."):
        return ""
    f, read = fields[re.sub(r"^reward\.scorers\.\w+\.", "reward.scorers.NAME.", key)], plain(value)
    if not fits(read, f.type, spelled=True):
        return kind_words(f.type)
    low, high, above = (f.metadata.get(bound) for bound in ("low", "high", "above"))
    if isinstance(read, int | float) and not isinstance(read, bool):
        if low is not None and read < low:
            return f"at least {low}"
        if high is not None and read > high:
            return f"at most {high}"
        if above is not None and read <= above:
            return f"greater than {above}"
    return ""


def other_value(key: str, value: object) -> str:
    """`; 'x' is 'y' here` for a value that other programs have, or why there is none; empty where it is not known."""
    if not isinstance(value, str | bool | None):
        return ""
    found = VALUES.get(key, {}).get("null" if value is None else str(value).lower())
    if isinstance(found, Why):
        return f"; {found.text}"
    return f"; {shown(value)} is {found} here" if found else ""


def _text(value: Any) -> str:
    return value if isinstance(value, str) else shown(value)
