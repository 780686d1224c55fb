"""The experiments and algorithm presets that there are: those that ship with gerl, and files of the user."""

import functools
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, ListConfig, OmegaConf

from gerl.commandline.files import either, near_names, read_yaml
from gerl.config.suggestions import other_value
from gerl.errors import ConfigError

PACKAGE = Path(__file__).resolve().parents[1]
CHOICES = ("experiment", "algorithm")  # what `NAME=VALUE` picks a yaml file by
NO_SCORERS = "_no_scorers"  # composed between an experiment that names its scorers and what that is based on
SUFFIXES = (".yaml", ".yml")


def config_folder() -> Path:
    """The folder of the shipped yaml files: inside an installed package, beside it in a checkout."""
    installed = PACKAGE / "configs"
    return installed if installed.is_dir() else PACKAGE.parent / "configs"


def own_file(override: str) -> str:
    """`experiment=path/to/mine.yaml`, or `algorithm=`, as an override by name, after making the file known to Hydra."""
    group, _, value = override.partition("=")
    if group not in CHOICES:
        return override
    if not value.endswith(SUFFIXES):
        # Hydra would also find a file that this process has made known before, and says what several values are
        if value not in shipped(group) and ("," not in value or value[:1] in "[{"):
            raise ConfigError(no_such(group, value))
        return override
    path = Path(value).expanduser()
    stem = _plain(path)
    if not path.is_file():
        beside = {file.stem: str(path.with_name(file.name)) for file in path.absolute().parent.glob("*.y*ml")}
        near = [stem] if stem in shipped(group) else [beside[name] for name in near_names(path.stem, list(beside))]
        hint = f"did you mean {either(near)}?" if near else "correct the path, or use the name of a built-in one"
        raise ConfigError(f"{group}={value}: there is no such file {path.absolute()}; {hint}")
    if stem in shipped(group):
        raise ConfigError(
            f"{group}={value}: gerl already has an {group} with this name; rename the file, or use {group}={stem}"
        )
    _make_known(path.absolute(), group, stem, f"{group}={value}", [])
    return f"{group}={stem}"


def _plain(path: Path) -> str:
    """The name of a file as Hydra takes it without quotes, and as it is fit for a folder."""
    return re.sub(r"[^\w.-]", "_", path.stem)


def _make_known(path: Path, group: str, name: str, where: str, known: list[tuple[Path, str]]) -> None:
    """Store a file as `group/name` for Hydra, with the files of the user that its `defaults` name; `known` are done."""
    if (path, name) in known:
        return
    known.append((path, name))
    content = read_yaml(path, where)
    if group == "experiment":
        for key in ("experiment", "preset"):  # in the config.yaml of a run they name what the run was composed from
            content.pop(key, None)
    _check_keys(content, where)
    _by_path(content, group, path, where, known)
    for other_group, other in _named(content, group):
        places = (path.parent,) if other_group == group else (path.parent / other_group, path.parents[1] / other_group)
        files = (place / f"{other}{suffix}" for place in places for suffix in SUFFIXES)
        if other not in shipped(other_group) and (file := next((f for f in files if f.is_file()), None)) is not None:
            _make_known(file, other_group, other, str(file), known)
    if group == "experiment":
        _replace_scorers(content)
    ConfigStore.instance().store(name, content, group=group, package="_global_")


def _by_path(content: DictConfig, group: str, path: Path, where: str, known: list[tuple[Path, str]]) -> None:
    """Make the files known whose paths are in the `defaults`, relative to the file, and put names in their place."""
    defaults = content.get("defaults")
    for i, entry in enumerate(defaults if isinstance(defaults, ListConfig) else ()):
        key, value = next(iter(entry.items())) if isinstance(entry, DictConfig) else ("", entry)
        if not isinstance(value, str) or not value.endswith(SUFFIXES):
            continue
        file = (path.parent / Path(value).expanduser()).absolute()
        if not file.is_file():
            raise ConfigError(
                f"{where}: defaults lists {value}, but there is no such file {file}; correct the path there"
            )
        name = f"{_plain(file)}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"  # gerl may have one of that name
        _make_known(file, str(key).removeprefix("override ").strip("/") or group, name, str(file), known)
        defaults[i] = {key: name} if key else name


def _named(content: DictConfig, group: str) -> Iterator[tuple[str, str]]:
    """Group and name of what the `defaults` of a file of `group` are composed from."""
    defaults = content.get("defaults")
    for entry in defaults if isinstance(defaults, ListConfig) else ():
        pairs: Any = entry.items() if isinstance(entry, DictConfig) else [("", entry)]
        for key, value in pairs:
            place = str(key).removeprefix("override ").strip("/") or group
            if isinstance(value, str) and value != "_self_":
                other, _, last = value.lstrip("/").rpartition("/")
                yield other or place, last


def _replace_scorers(content: DictConfig) -> None:
    """Have the scorers that an experiment names replace those of what it is composed from."""
    defaults = content.get("defaults")
    if isinstance(defaults, ListConfig) and OmegaConf.select(content, "reward.scorers") is not None:
        after = [
            i for i, entry in enumerate(defaults) if entry == "_self_" or str(next(iter(entry))).startswith("override ")
        ]
        defaults.insert(min(after, default=len(defaults)), NO_SCORERS)


def _check_keys(content: DictConfig, where: str) -> None:
    """A file nests its blocks, where the command line has dots."""
    for name in map(str, content):
        block, dot, leaf = name.partition(".")
        if dot:
            raise ConfigError(f"{where}: {name} has a dot; in a file write '{block}:', and indented below it '{leaf}:'")


def default_experiment(model: str | None) -> str:
    """The experiment of a command line that names none: the demo for its own model, gerl's defaults for another."""
    return "signs" if model in (None, "signs") else "plain"


def experiments() -> list[str]:
    """The names of the shipped experiments."""
    return shipped("experiment")


def shipped(group: str) -> list[str]:
    """The names of the shipped yaml files of `group` (experiment, algorithm)."""
    return sorted(p.stem for p in (config_folder() / group).glob("*.yaml"))


def algorithm_of(preset: str) -> str:
    """The `algorithm.name` of a shipped `algorithm=PRESET`; empty for another one."""
    return str(preset_of(preset).name) if preset in shipped("algorithm") else ""


@functools.cache
def preset_of(preset: str) -> DictConfig:
    """The keys of the block `algorithm` that a shipped preset sets."""
    block = OmegaConf.load(config_folder() / "algorithm" / f"{preset}.yaml").algorithm
    assert isinstance(block, DictConfig)
    return block


def no_such(group: str, value: str) -> str:
    """The sentence for an experiment or algorithm that there is none of."""
    names = shipped(group)
    near = near_names(value, names)
    if group == "experiment" and Path(value + ".yaml").is_file():
        near = [f"{value}.yaml"]
    if known := other_value(group, value):
        return f"{group}={value}: there is no such {group}{known}; --help lists all"
    own = ", or give the path of your own .yaml file" if group == "experiment" else ""
    hint = f"did you mean {either(near)}; --help lists all" if near else f"choose one of {', '.join(names)}{own}"
    return f"{group}={value}: there is no such {group}; {hint}"
