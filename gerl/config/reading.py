"""Parse nested dictionaries into the typed configuration, with messages for errors in them."""

import functools
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from gerl.config.algorithms import UnknownAlgorithm, settings_class
from gerl.config.changes import flat_settings
from gerl.config.configuration import Config
from gerl.config.registry import ALGORITHMS
from gerl.config.samplers import AUTO, CHOICES
from gerl.config.schema import fits, kind_words, shown
from gerl.config.suggestions import LISTED, answered, did_you_mean, is_foreign, keys, other_name, other_value, readers
from gerl.errors import ConfigError


def from_mapping(values: dict[str, Any]) -> Config:
    """Return the typed configuration from nested dictionaries. Raises `ConfigError` with the first invalid key."""
    algorithm = values.get("algorithm", {})
    if isinstance(algorithm, dict):  # the default algorithm
        values = {**values, "algorithm": {"name": "flow_grpo", **algorithm}}
    _check_booleans(values)
    try:
        return _adapter().validate_python(values)
    except UnknownAlgorithm as error:
        *names, last = map(repr, ALGORITHMS)
        (wrong,) = error.args
        hint = other_value("algorithm", wrong)
        raise ConfigError(f"algorithm.name={shown(wrong)}: it must be {', '.join(names)} or {last}{hint}") from None
    except ValidationError as error:
        if foreign := _foreign(error.errors()):
            raise ConfigError(refusal(foreign, {})) from None
        raise ConfigError(_sentence(error.errors()[0], values)) from None


def _foreign(errors: Iterable[ErrorDetails]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for error in (error for error in errors if error["type"] == "unexpected_keyword_argument"):
        location = [str(part) for part in error["loc"]]
        if not (location[0] == "algorithm" and readers(location[-1])):
            values |= {name: value for name, value in _leaves(".".join(location), error["input"]) if is_foreign(name)}
    return values


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    listed = isinstance(value, list) and any(isinstance(part, Mapping) for part in value)
    nested = isinstance(value, Mapping) or listed
    if not nested or other_name(name) == "reward.scorers":
        yield name, value
        return
    parts = value.items() if isinstance(value, Mapping) else enumerate(value)
    for key, part in parts:
        yield from _leaves(f"{name}.{key}", part)


Spelling = Callable[[Mapping[str, Any]], str]


def refusal(names: Mapping[str, Any], ours: Mapping[str, Any], spelling: Spelling | None = None) -> str:
    """Return the error message for keys of other programs, next to gerl's, `ours`; `spelling` formats them."""
    *others, last = names
    named = f"{', '.join(others)} and {last} are keys" if others else f"{last}: a key"
    return f"{named} of another program: {advice(names, ours, spelling)}"


def advice(
    values: Mapping[str, Any], ours: Mapping[str, Any], spelling: Spelling | None = None, first: str = ""
) -> str:
    """Return the translation of other programs' keys, preceded by `first`, with reasons."""
    answer = answered(values, ours)
    lines = " ".join(filter(None, [first, (spelling or typed)(answer.written)]))
    parts = [f"write {lines}"] if lines else []
    parts += [f"remove {', '.join(answer.idle)}"] if answer.idle else []
    reasons: dict[str, list[str]] = {}
    for name, reason in answer.why.items():
        reasons.setdefault(reason, []).append(name)
    parts += [f"{', '.join(names)}: {why}" if [*values] != names else why for why, names in reasons.items()]
    return f"{'; '.join(parts)}; {LISTED}, docs/migrate compares them"


def typed(values: Mapping[str, Any]) -> str:
    """Format arguments for a shell."""
    arguments = [f"{key}={value if isinstance(value, str) else flow(value)}" for key, value in values.items()]
    return " ".join(f'"{a}"' if "'" in a and not re.search(r'["$`\\!]', a) else shlex.quote(a) for a in arguments)


def flow(value: Any) -> str:
    """Format a value for the command line, with quotes only if needed."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {flow(part)}" for key, part in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(flow, value)) + "]"
    if not isinstance(value, str):
        return shown(value)
    plain = re.fullmatch(r"[A-Za-z_./~][\w./~:@+-]*", value, re.ASCII) and value.lower() not in RESERVED
    return value if plain else "'" + value.replace("'", "\\'") + "'"


def _check_booleans(values: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for a boolean instead of a number or vice versa, which pydantic would convert."""
    field_of = dict(keys(settings_class(values["algorithm"])))
    for name, value in flat_settings(values).items():
        scorer = re.fullmatch(r"reward\.scorers\.([^.]+)\.(\w+)", name)
        f = field_of.get(f"reward.scorers.NAME.{scorer[2]}" if scorer else name)
        if f is not None and _is_boolean(value) != _is_boolean(f.type) and not fits(value, f.type, spelled=True):
            raise ConfigError(f"{name}={shown(value)}: it must be {kind_words(f.type)}")


def _is_boolean(kind: Any) -> bool:
    """Whether `kind` is a boolean, a list that contains one, or the type `bool`."""
    return kind is bool or isinstance(kind, bool) or (isinstance(kind, list) and any(map(_is_boolean, kind)))


@functools.cache
def _adapter() -> TypeAdapter[Config]:
    return TypeAdapter(Config)


def _sentence(first: ErrorDetails, values: Mapping[str, Any]) -> str:
    location = [str(part) for part in first["loc"]]
    name = ".".join(location)
    if first["type"] != "unexpected_keyword_argument":
        return f"{name}={shown(first['input'])}: {expected(first, name)}{other_value(name, first['input'])}"
    of_algorithm = location[0] == "algorithm"
    if of_algorithm and (able := readers(location[-1])):
        text = first["input"] if isinstance(first["input"], str) else shown(first["input"])
        return f"{name}={text:.200}: {values['algorithm']['name']} does not read it, only {', '.join(able)}; remove it"
    near = did_you_mean(name, settings_class(values["algorithm"]) if of_algorithm else None)
    return f"{name}: there is no such key{near}; {LISTED}"


RESERVED = ("null", "true", "false", "nan", "inf")
EXPECTED = {
    "int_type": "an integer",
    "int_parsing": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "a string",
    "string_pattern_mismatch": "a name of letters, digits and underscores",
    "list_type": "a list, such as [1,2]",
    "dict_type": "a dictionary, such as {NAME: VALUE}",
}  # by pydantic's error type


def _scorer_for(value: object, name: str) -> dict[str, Any]:
    if name == "reward" and isinstance(value, str) and value.isidentifier():
        return {"reward.scorers": {value: {}}}
    if not name.startswith("reward.scorers.") or isinstance(value, bool):
        return {}
    if isinstance(value, int | float):
        return {f"{name}.weight": value}
    return {f"{name}.path": value} if isinstance(value, str) and value.endswith(".py") else {}


def expected(error: ErrorDetails, name: str) -> str:
    """Describe the expected kind of value in terms of the command line."""
    if error["type"] == "dataclass_type":
        if written := _scorer_for(error["input"], name):
            return f"it is a block of keys, write {typed(written)}"
        leaf = "path" if name.startswith("reward.scorers.") else next(k for k, _ in keys() if k.startswith(f"{name}."))
        return f"it is a block of keys, set one of them, such as {name}.{leaf.removeprefix(f'{name}.')}=VALUE"
    if name == "reward.scorers":
        return "it must be a dictionary, such as {ocr: {weight: 1}}"
    if name == "logger.trackers":
        return "it must be a list, such as [tensorboard,wandb], or [] for none"
    wanted = EXPECTED.get(error["type"]) or error["msg"].removeprefix("Input should be ")
    return f"it must be {repr(AUTO) + ', ' if name.removeprefix('sampling.') in CHOICES else ''}{wanted}"
