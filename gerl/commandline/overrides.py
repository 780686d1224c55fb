"""Arguments `key=value` in the grammar of Hydra: read one by one, and set in nested dictionaries.

Hydra is asked what a value is; which keys there are, and what setting one means, is decided here.
"""

import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from gerl.commandline.hydra_options import spelled
from gerl.config import LISTED, did_you_mean, nearest_key, shown
from gerl.errors import ConfigError

# a source of prompts with a split, which Hydra takes for the beginning of a list
HUB_SOURCE = re.compile(r"""(?<!["'\w])hf:[^\s"'\[\]{},]+\[(?:[^"'\[\]]|\[[^"'\[\]]*\])+\]""")
PROMPTS = ("data.train", "validation.data")
TYPOGRAPHIC = re.compile("[\u2018-\u201f\u00ab\u00bb]")  # quotes
WHOLE = "reward.scorers"  # a dictionary that is replaced where it is given as a whole; others are merged


def key_of(argument: str) -> str:
    """The key of an argument, without the signs of Hydra."""
    return argument.partition("=")[0].lstrip("+~")


def read(argument: str) -> Override:
    """An argument as Hydra reads it; a value that its grammar has no form for is a text, or YAML in brackets.

    Raises `ConfigError` for what can be read in neither way.
    """
    name, equals, value = argument.partition("=")
    if key_of(argument) in PROMPTS:
        argument = HUB_SOURCE.sub(lambda source: f"'{source[0]}'", argument)
    if (parsed := _parsed(argument)) is not None:
        return parsed
    if equals and (parsed := _parsed(f"{name}=0")) is not None and not _is_slip(value):
        plain = _flow(value) if _is_bracketed(value) else value
        if plain is not None:
            return replace(parsed, _value=plain, input_line=argument)
    raise ConfigError(_unreadable(argument))


def readable(argument: str) -> str:
    """The argument as Hydra's own parser takes it; raises as `read`."""
    override = read(argument)
    line = override.input_line or argument
    return line if _parsed(line) is not None else f"{line.partition('=')[0]}={spelled(override.value())}"


@functools.cache
def _parser() -> OverridesParser:
    return OverridesParser.create()


def _parsed(argument: str) -> Override | None:
    try:
        return _parser().parse_override(argument)
    except (HydraException, ValueError):  # a cast such as int(x) of what is no number
        return None


def _is_slip(value: str) -> bool:
    """Whether a value that cannot be read was meant in another way than as a text."""
    return value[:1] in ("", "=", "'", '"') or value[-1] in "'\"" or bool(TYPOGRAPHIC.match(value))


def _is_bracketed(value: str) -> bool:
    """Whether it is meant as a list or a dictionary; `[a] b.txt` is a text."""
    closed = all(value.count(opening) == value.count(closing) for opening, closing in ("[]", "{}"))
    return value[0] in "[{" and (value[-1] in "]}" or not closed)


def _flow(text: str) -> Any:
    """A list or dictionary in YAML's form with brackets; None where it is none."""
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError):
        return None


def _unreadable(argument: str) -> str:
    """The sentence for an argument with an equals sign that cannot be read."""
    name, _, value = argument.partition("=")
    key = nearest_key(re.sub(r"[^\w.]+|\.{2,}", ".", name.lstrip("+~")).strip("."))
    if key is not None and key != name.lstrip("+~"):
        return f"{argument}: expected key=value, did you mean {key!r}; {LISTED}"
    if value.startswith("="):
        return f"{argument}: one equals sign is enough, write {name}={value.lstrip('=')}"
    plain = TYPOGRAPHIC.sub("", value)
    if plain not in ("", value) and _parsed(f"{name}={plain}") is not None:
        return f"{argument}: typographic quotes are not supported, write {name}={plain}"
    if any(value.count(opening) != value.count(closing) for opening, closing in ("[]", "{}")):
        return f"{argument}: unbalanced brackets; write lists as [1,2] and dictionaries as {{a: 1}}"
    return f"{argument}: expected key=value; correct the quotes or brackets of its value; {LISTED}"


def check_one_value(given: Sequence[Override]) -> None:
    """Raise `ConfigError` where arguments give one key two different values, of which Hydra would take the last."""
    found: dict[str, tuple[str, Override]] = {}
    for override in (override for override in given if not override.is_delete()):
        for key, value in _leaves(override.key_or_group, override.value()):
            before, first = found.setdefault(key, (repr(value), override))
            if before != repr(value):
                raise ConfigError(f"{first.input_line} and {override.input_line} are both given: keep one")


def _leaves(key: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict) and value:
        for name, part in value.items():
            yield from _leaves(f"{key}.{name}", part)
    else:
        yield key, value


def set_keys(values: dict[str, Any], given: Sequence[Override], again: bool = False) -> None:
    """Set, add and take away keys in nested `values`, in the order in which they are given; raises `ConfigError`.

    again: `values` may be what the same arguments made before: what is to be added may be there, and what is to be
    taken away may be gone.
    """
    blocks = list(values)
    for override in given:
        key, value = override.key_or_group, override.value()
        *names, leaf = key.split(".")
        if "/" in key or override.package is not None or (names or [leaf])[0] not in blocks:
            raise no_such_key(key)
        if override.is_sweep_override():
            raise ConfigError(
                f"{override.input_line or key}: expected one value; write a list as [1,2], a number with a point "
                "as in 0.5, and quote a string with a comma, as in \"'a, b'\"; -m trains once with each of several "
                "values"
            )
        if override.is_delete():
            _take_away(values, override, again)
            continue
        place = _place(values, names, key)
        old = place.get(leaf)
        merged = isinstance(value, dict) and isinstance(old, dict) and (key != WHOLE or override.is_add())
        if override.is_add() and old is not None and not merged and not again:
            raise ConfigError(f"+{key}: the key exists, set it without the plus sign")
        place[leaf] = _merged(old, value) if merged else value


def _place(values: dict[str, Any], names: Sequence[str], key: str) -> dict[str, Any]:
    """The dictionary that has, or shall have, the last part of `key`."""
    place = values
    for name in names:
        if place.get(name) is None:
            place[name] = {}
        place = place[name]
        if not isinstance(place, dict):
            raise no_such_key(key)
    return place


def _merged(old: Any, new: Any) -> Any:
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    return {**old, **{name: _merged(old.get(name), part) for name, part in new.items()}}


def _take_away(values: dict[str, Any], override: Override, again: bool) -> None:
    """Have `~KEY` leave the default of a key, and no entry of a dictionary."""
    key, value = override.key_or_group, override.value()
    if key in ("algorithm", "algorithm.name"):
        raise ConfigError(f"~{key}: a run has one algorithm; choose another with algorithm=NAME")
    *names, leaf = key.split(".")
    place: Any = values
    for name in names:
        place = place.get(name) if isinstance(place, dict) else None
    if not isinstance(place, dict) or leaf not in place:
        scorers = values.get("reward", {}).get("scorers") or {}
        other = key.startswith(f"{WHOLE}.") and key.split(".")[2] not in scorers
        if again or (nearest_key(key) == key and not other):
            return  # it has its default already
        entries = f"; there are {', '.join(scorers)}" if other and scorers else did_you_mean(key)
        raise ConfigError(f"~{key}: there is no such key{entries}; {LISTED}")
    if value is not None and value != place[leaf]:
        raise ConfigError(f"~{key}={value}: it is {shown(place[leaf])}; omit the value, or set the key to another")
    del place[leaf]


def no_such_key(key: str) -> ConfigError:
    """The error for a key that there is none of."""
    return ConfigError(f"{key}: there is no such key{did_you_mean(key)}; {LISTED}")
