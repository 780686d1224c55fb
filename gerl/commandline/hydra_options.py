"""Hydra's own options of training: `-m` for sweeps, `--cfg job` to look, `--config-dir` for experiments of your own."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra.core.override_parser.types import Quote, QuotedString

from gerl.commandline.experiments import experiments
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

    With `--config-dir DIR`, `experiment=NAME` becomes the path of a file in DIR/experiment or DIR.
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
                raise ConfigError(f"{argument}: {name} has no value, write {name} alone, before or behind the keys")
            values[MULTIRUN[-1]] = name
        else:
            value = value if equals else next(waiting, "")
            if kind[-1] in values:
                raise ConfigError(f"{name} is given twice: keep one")
            if not value:
                raise ConfigError(f"{name} is empty: give {name} {'job' if kind is SHOW else 'a folder'}")
            values[kind[-1]] = value
    shown = values.get(SHOW[-1])
    if shown not in (None, "job"):
        raise ConfigError(f"--cfg {shown}: give job, the configuration of the run; of Hydra itself nothing is shown")
    if shown and MULTIRUN[-1] in values:
        raise ConfigError(f"{values[MULTIRUN[-1]]} and --cfg: a sweep has many configurations; keep one of them")
    if (folder := values.get(FOLDER[-1])) is not None:
        rest = _from_folder(rest, Path(folder).expanduser())
    return HydraOptions(rest, MULTIRUN[-1] in values, shown is not None)


def quoted(value: str) -> str:
    """A text as Hydra reads it back, whatever is in it."""
    return QuotedString(value, Quote.single).with_quotes()


def _from_folder(arguments: Sequence[str], folder: Path) -> list[str]:
    if not folder.is_dir():
        raise ConfigError(f"--config-dir {folder}: there is no such folder; give the one that has your experiments")
    return [_own(argument, folder) if argument.startswith("experiment=") else argument for argument in arguments]


def _own(argument: str, folder: Path) -> str:
    """`experiment=NAME[,NAME ...]` with the paths of those that are files in the folder."""
    names = argument.removeprefix("experiment=").split(",")
    return "experiment=" + ",".join(_path(name, folder) for name in names)


def _path(name: str, folder: Path) -> str:
    places = (folder / "experiment", folder)
    files = [place / f"{name}{suffix}" for place in places for suffix in ("", ".yaml", ".yml")]
    if name and not Path(name).is_file():  # a path of its own stays one
        if (
            file := next((file for file in files if file.suffix in (".yaml", ".yml") and file.is_file()), None)
        ) is not None:
            return str(file)
        if not name.endswith((".yaml", ".yml")) and name not in experiments():
            there = sorted({file.stem for place in places for file in place.glob("*.y*ml")})
            near = near_names(name, [*there, *experiments()])
            hint = f"did you mean {either(near)}?" if near else f"it has {', '.join(there) or 'none'}"
            raise ConfigError(f"experiment={name}: there is no such file in --config-dir {folder}; {hint}")
    return name
