"""From Python arguments to what a command line would say: keys, prompts and rewards, written down in the run folder."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from gerl.commandline.experiments import SUFFIXES, own_file
from gerl.commandline.hydra_options import spelled
from gerl.config import LISTED, did_you_mean, is_foreign, keys, nearest_key
from gerl.config.reading import refusal
from gerl.config.suggestions import OPEN
from gerl.config.suggestions import plain as spelt
from gerl.errors import ConfigError, DataError
from gerl.objects import PREFIX
from gerl.utils.files import write_file

Reward = str | Callable[..., object] | Mapping[str, Any]
Prompts = str | Path | Sequence[str | Mapping[str, Any]]
NAME = re.compile(r"\W+")
ROWS = {"train": "prompts.jsonl", "held_out": "held_out.jsonl"}  # in the run folder


@dataclass
class Scorers:
    """The rewards of a run: as keys of the configuration, and the functions that some of them are."""

    keys: dict[str, Any] = field(default_factory=dict)
    functions: dict[str, Callable[..., object]] = field(default_factory=dict)

    def add(self, name: str, given: object) -> None:
        """A scorer called `name`: a function, the name or file of one, a mapping of its keys, or a weight.

        In a mapping `function` may be a function itself. Raises `ConfigError` for anything else.
        """
        own: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {}
        if isinstance(given, bool) or not (isinstance(given, str | Path | int | float | Mapping) or callable(given)):
            raise ConfigError(
                f"reward: {name} is {type(given).__name__}: expected a function, a name, a file or a dictionary of keys"
            )
        if callable(given):
            own = {"function": given}
        elif isinstance(given, int | float):
            own = {"weight": float(given)}
        elif isinstance(given, Path) or (isinstance(given, str) and given.endswith(".py")):
            own = {"path": str(given)}
        elif isinstance(given, str) and given != name:
            raise ConfigError(f"reward: {name}={given!r}: expected a Python file, or the scorer's own name as the name")
        if callable(function := own.get("function")):
            del own["function"]
            own["path"] = f"{PREFIX}{name}"
            self.functions[name] = function
        self.keys[name] = own


def scorers_of(reward: object) -> Scorers:
    """The scorers that `reward` names: one function or name, or several by name."""
    found = Scorers()
    if isinstance(reward, Mapping):
        for name, given in reward.items():
            found.add(_checked(str(name)), given)
        return found
    if callable(reward):
        found.add(_named(reward), reward)
    elif isinstance(reward, str | Path) and str(reward).endswith(".py"):
        found.add(_checked(NAME.sub("_", Path(reward).stem)), str(reward))
    elif isinstance(reward, str):
        found.add(reward, reward)
    else:
        raise ConfigError(
            f"reward: it is a {type(reward).__name__}; expected a function, a name, or several by name such as "
            "{'ocr': 1.0, 'mine': function}"
        )
    return found


def _named(function: Callable[..., object]) -> str:
    name = NAME.sub("_", getattr(function, "__name__", type(function).__name__)).strip("_")
    return "my_reward" if name in ("", "lambda", "reward") else name


def _checked(name: str) -> str:
    if not name.isidentifier():
        raise ConfigError(f"reward: {name!r} is not a valid scorer name; use letters, digits and underscores")
    return name


def nested(
    given: Mapping[str, Any], beside: Mapping[str, Any] | None = None, arguments: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Keys with dots, and blocks of keys, as blocks.

    `beside`: keys that arguments of the function set, whose names are in `arguments`. Raises `ConfigError` for a key
    that there is not, and for two values of one.
    """
    _check_names(given, beside or {}, arguments or {})
    found: dict[str, Any] = {}
    for key, value in [*(beside or {}).items(), *given.items()]:
        block, *inner = key.split(".")
        if not inner and not isinstance(value, Mapping):
            raise ConfigError(f"{key}={value!r}: it is a block of keys: expected a dictionary, or '{key}.KEY'")
        place = found.setdefault(block, {})
        for name in inner[:-1]:
            place = place.setdefault(name, {})
        new = nested_values(value) if not inner else {inner[-1]: plain(value)}
        for name, part in new.items():
            place[name] = _merged(f"{key}.{name}" if not inner else key, place[name], part) if name in place else part
    return found


def _merged(key: str, old: Any, new: Any) -> Any:
    if isinstance(old, dict) and isinstance(new, dict):
        return old | {name: _merged(f"{key}.{name}", old[name], part) if name in old else part
                      for name, part in new.items()}  # fmt: skip
    if repr(old) != repr(new):
        raise ConfigError(f"{key} is given twice, as {old!r} and {new!r}: keep one")
    return new


def _check_names(given: Mapping[str, Any], beside: Mapping[str, Any], arguments: Mapping[str, str]) -> None:
    """Raise `ConfigError` for names that are no keys, of other programs all at once, with what is to be written."""
    known = {key.split(".")[0] for key, _ in keys()} | {"hydra"}
    spelling = partial(_python, arguments=arguments)
    blocks = {key for key, value in given.items() if key in known and isinstance(value, Mapping)}
    if foreign := {key: value for key, value in given.items() if key not in blocks and is_foreign(key)}:
        own = {key: value for key, value in {**beside, **given}.items() if key not in foreign}
        raise ConfigError(refusal(foreign, own, spelling))
    for key, value in given.items():
        if key.split(".")[0] not in known:
            near = nearest_key(key)
            hint = f", write {spelling({near: value})}" if near and "." in near else did_you_mean(key)
            raise ConfigError(f"{key}: there is no such key{hint}; {LISTED}")


def _python(values: Mapping[str, Any], arguments: Mapping[str, str]) -> str:
    """Keys and values as a call in Python has them: `steps=3, **{"actor.lr": 1e-4}`."""

    def literal(value: Any) -> str:
        return OPEN if value == OPEN else json.dumps(read) if isinstance(read := spelt(value), str) else repr(read)

    own = [f"{arguments[key]}={literal(value)}" for key, value in values.items() if key in arguments]
    rest = [f"{json.dumps(key)}: {literal(value)}" for key, value in values.items() if key not in arguments]
    return ", ".join([*own, f"**{{{', '.join(rest)}}}"] if rest else own)


def nested_values(given: Mapping[str, Any]) -> dict[str, Any]:
    """A block given as a dictionary."""
    return {str(name): plain(value) for name, value in given.items()}


def plain(value: object) -> Any:
    """`value` as YAML has it; raises `ConfigError` for an object that it has not."""
    if isinstance(value, Mapping):
        return nested_values(value)
    if isinstance(value, list | tuple | range):
        return [plain(part) for part in value]
    if isinstance(value, Path):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ConfigError(f"{value!r:.80} is {type(value).__name__}: keys must be numbers, strings, lists and dictionaries")


def overrides_of(values: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The arguments of a command line that set the keys in these blocks."""
    return [f"{block}.{key}={spelled(value)}" for block, part in values.items() for key, value in part.items()]


def write_prompts(prompts: Prompts, file: Path) -> str:
    """The prompt file of `prompts`: they are its name, or are written to `file`; raises `DataError` for no prompts."""
    if isinstance(prompts, str | Path):
        return str(prompts)
    if not isinstance(prompts, Iterable):
        raise DataError(f"prompts are {type(prompts).__name__}: expected a list of strings, or the name of a file")
    rows: list[dict[str, Any]] = []
    for i, prompt in enumerate(prompts):
        row = {"prompt": prompt} if isinstance(prompt, str) else dict(prompt) if isinstance(prompt, Mapping) else None
        if row is None:
            raise DataError(
                f"prompt {i} is {type(prompt).__name__}: expected a string, or a dictionary with the key prompt"
            )
        rows.append(row)
    if not rows:
        raise DataError("there are no prompts: give at least one, or the name of a file")
    try:
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"columns of a prompt must be strings and numbers ({error}): give images as file paths"
        ) from None
    write_file(file, text)
    return str(file)


def write_experiment(
    folder: Path, name: str, base: str | Path | None, algorithm: str | None, values: dict[str, Any]
) -> Path:
    """An experiment file in `folder` that composes what is asked for, and can be used again on a command line.

    `base` and `algorithm`: names, or yaml files. Raises `ConfigError` if there is no such one.
    """
    defaults: list[object] = [] if base is None else [_entry("experiment", base)]
    if algorithm is not None:
        defaults.append({"override /algorithm": _entry("algorithm", algorithm)})
    file = folder / f"{name}.yaml"
    content = {**({"defaults": [*defaults, "_self_"]} if defaults else {}), **values}
    write_file(file, "# @package _global_\n" + yaml.safe_dump(content, sort_keys=False, allow_unicode=True))
    return file


def _entry(group: str, given: str | Path) -> str:
    """A name or file as the `defaults` of an experiment file have it, wherever that lies."""
    own_file(f"{group}={given}")  # says what is wrong with it
    return str(Path(given).expanduser().absolute()) if str(given).endswith(SUFFIXES) else str(given)
