"""Hydra's own options: `-m` for sweeps, `--cfg job` to look, `--config-dir` for experiments of your own.

The first two are of training, the last one of every command that takes an experiment.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra.core.override_parser.types import Quote, QuotedString

from gerl.commandline.experiments import CHOICES, shipped
from gerl.commandline.files import either, near_names
from gerl.errors import ConfigError

MULTIRUN = ("-m", "--multirun")
SHOW = ("-c", "--cfg")
FOLDER = ("-cd", "--config-dir")


@dataclass(frozen=True)
class HydraOptions:
    """The arguments without Hydra's options.

    multirun: train once for each combination of the values given. shown: only print the configuration.
    """

    arguments: list[str]
    multirun: bool = False
    shown: bool = False


def hydra_options(given: Sequence[str]) -> HydraOptions:
    """Take Hydra's options out of the arguments of a command line; raises `ConfigError` for what they cannot be.

    With `--config-dir DIR`, `experiment=NAME` becomes the path of a file in DIR/experiment or DIR, and `algorithm=NAME`
    that of one in DIR/algorithm.
    """
    rest, values = list[str](), dict[str, str]()
    waiting = iter(given)
    for argument in waiting:
        name, equals, value = argument.partition("=")
        kind = next((kind for kind in (MULTIRUN, SHOW, FOLDER) if name in kind), None)
        if kind is None:
            rest.append(argument)
        elif kind is MULTIRUN:
            if equals:
                raise ConfigError(f"{argument}: {name} takes no value, write {name} alone, before or after the keys")
            values[MULTIRUN[-1]] = name
        else:
            value = value if equals else next(waiting, "")
            if kind[-1] in values:
                raise ConfigError(f"{name} is given twice: keep one")
            if not value:
                raise ConfigError(f"{name} is empty: expected {name} {'job' if kind is SHOW else 'a folder'}")
            values[kind[-1]] = value
    shown = values.get(SHOW[-1])
    if shown not in (None, "job"):
        raise ConfigError(f"--cfg {shown}: use job, the configuration of the run; Hydra's own is not shown")
    if shown and MULTIRUN[-1] in values:
        raise ConfigError(f"{values[MULTIRUN[-1]]} and --cfg: a sweep has many configurations; keep one of them")
    if (folder := values.get(FOLDER[-1])) is not None:
        rest = _from_folder(rest, Path(folder).expanduser())
    return HydraOptions(rest, MULTIRUN[-1] in values, shown is not None)


def without_options(given: Sequence[str]) -> list[str]:
    """As `hydra_options`, for the commands that do not train; raises `ConfigError` for what only training has."""
    options = hydra_options(given)
    if options.multirun or options.shown:
        name = next(argument for argument in given if argument.partition("=")[0] in MULTIRUN + SHOW)
        does = "trains with several values" if options.multirun else "prints a configuration"
        raise ConfigError(f"{name}: only gerl train {does}; remove it here")
    return options.arguments


def quoted(value: str) -> str:
    """A text as Hydra reads it back, whatever is in it."""
    return QuotedString(value, Quote.single).with_quotes()


def spelled(value: object) -> str:
    """A plain value as Hydra's command line has it."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(key)}: {spelled(part)}" for key, part in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(spelled, value)) + "]"
    return quoted(value) if isinstance(value, str) else json.dumps(value)


def _key(key: object) -> str:
    """A key of a dictionary, which Hydra knows without quotes only."""
    return re.sub(r"([\\()\[\]{}:=, \t])", r"\\\1", str(key))


def _from_folder(arguments: Sequence[str], folder: Path) -> list[str]:
    if not folder.is_dir():
        raise ConfigError(f"--config-dir {folder}: there is no such folder; use the one with your experiments")
    return [_own(argument, folder) for argument in arguments]


def _own(argument: str, folder: Path) -> str:
    """`experiment=NAME[,NAME ...]`, or `algorithm=`, with the paths of those that are files in the folder."""
    group, _, names = argument.partition("=")
    return (
        f"{group}={','.join(_path(group, name, folder) for name in names.split(','))}" if group in CHOICES else argument
    )


def files_in(group: str, folder: Path) -> list[str]:
    """The names by which `group=NAME` finds the files of a `--config-dir`."""
    return sorted({file.stem for place in _places(group, folder) for file in place.glob("*.y*ml")})


def _places(group: str, folder: Path) -> tuple[Path, ...]:
    return (folder / "experiment", folder) if group == "experiment" else (folder / group,)


def _path(group: str, name: str, folder: Path) -> str:
    places = _places(group, folder)
    files = [place / f"{name}{suffix}" for place in places for suffix in ("", ".yaml", ".yml")]
    if name and not Path(name).is_file():  # a path of its own stays one
        if (
            file := next((file for file in files if file.suffix in (".yaml", ".yml") and file.is_file()), None)
        ) is not None:
            return str(file)
        if not name.endswith((".yaml", ".yml")) and name not in shipped(group):
            there = files_in(group, folder)
            near = near_names(name, [*there, *shipped(group)])
            hint = f"did you mean {either(near)}?" if near else f"it has {', '.join(there) or 'none'}"
            raise ConfigError(f"{group}={name}: there is no such file in --config-dir {folder}; {hint}")
    return name
