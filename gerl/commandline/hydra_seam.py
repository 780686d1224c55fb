"""The seam to Hydra: it composes the files that are chosen, and its errors become sentences by their type."""

import contextlib
import dataclasses
import difflib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    GrammarParseError,
    InterpolationKeyError,
    InterpolationResolutionError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    UnsupportedInterpolationType,
)

from gerl.commandline.experiments import CHOICES, NO_SCORERS, config_folder, no_such, own_file
from gerl.commandline.hydra_options import quoted
from gerl.commandline.overrides import WHOLE, key_of, readable
from gerl.config import LISTED, Config
from gerl.errors import ConfigError

FREE = ("sampling.call", "reward.scorers", "data.columns", "algorithm")  # what Hydra lets a sweep add keys to
FOLDER, SWEEPS = "hydra.run.dir", "hydra.sweep.dir"
GROUPS = ("launcher", "sweeper", "env", "help", "hydra_help", "hydra_logging", "job_logging", "output")
PLUGINS = {"sweeper": "optuna", "launcher": "submitit_slurm"}
ENDLESS = "a value has endlessly nested mappings or lists: use fewer"


@dataclass(frozen=True)
class Files:
    """The defaults and the files that were chosen: gerl's blocks as plain values, and the whole as Hydra has it."""

    values: dict[str, Any]
    whole: DictConfig

    @property
    def experiment(self) -> str:
        return str(self.whole.hydra.runtime.choices.experiment)

    @property
    def algorithm(self) -> str:
        """The preset."""
        return str(self.whole.hydra.runtime.choices.algorithm)

    @property
    def one_folder(self) -> bool:
        """Whether the folder of the run does not depend on the time."""
        return "${now:" not in str(OmegaConf.to_container(self.whole.hydra.run, resolve=False))

    def run_dir(self) -> Path:
        """The folder of the run; raises `ConfigError` for an empty one."""
        try:
            given = self.whole.hydra.run.dir
        except OmegaConfBaseException as error:
            raise ConfigError(_unresolved(error, {"hydra": OmegaConf.to_container(self.whole.hydra)})) from None
        if not given:
            raise ConfigError(f"{FOLDER} is empty: give a folder for the run, or omit the key")
        return Path(given)


def compose_files(chosen: Sequence[str], given: Sequence[Override]) -> Files:
    """Compose the files that are `chosen`, and the settings of Hydra in `given`; raises `ConfigError`."""
    for override in filter(is_hydra, given):
        if override.is_delete() or override.key_or_group == "hydra":
            raise ConfigError(
                f"{override.input_line}: Hydra's own settings are set one by one, and none can be removed; give "
                f"{FOLDER}=FOLDER, or omit it"
            )
    for override in given:
        group = override.key_or_group
        if group.startswith("hydra/") and group.removeprefix("hydra/") not in GROUPS:
            raise ConfigError(f"{group}: there is no such key; there are hydra/{', hydra/'.join(GROUPS)}; {LISTED}")
    register()
    groups = [o.input_line or "" for o in given if o.key_or_group.startswith("hydra/")]
    GlobalHydra.instance().clear()
    with sentences(chosen), initialize_config_dir(str(config_folder()), version_base="1.3"):
        names = [_in_quotes(own_file(override)) for override in chosen]
        whole = compose("config", [*names, *groups], return_hydra_config=True)
        values = OmegaConf.to_container(OmegaConf.masked_copy(whole, [str(name) for name in whole if name != "hydra"]))
    assert isinstance(values, dict)
    for override in (o for o in given if o.key_or_group.startswith("hydra.")):
        set_hydra(whole, override)
    return Files({str(block): entries for block, entries in values.items()}, whole)


def _in_quotes(override: str) -> str:
    """`experiment=NAME` in the quotes that a name needs which is not of ASCII."""
    group, _, name = override.partition("=")
    return override if name.isascii() else f"{group}={quoted(name)}"


def register() -> None:
    """Make the defaults known to Hydra as `gerl`."""
    schema = OmegaConf.create(defaults())
    for free in FREE:
        OmegaConf.set_struct(OmegaConf.select(schema, free), False)
    ConfigStore.instance().store("gerl", schema)
    ConfigStore.instance().store(NO_SCORERS, {"reward": {"scorers": None}}, group="experiment", package="_global_")


@functools.cache
def defaults() -> dict[str, Any]:
    """The default of every key but the algorithm's, which are those of its class. Nothing of it may be changed."""
    values = dataclasses.asdict(Config())
    values["algorithm"] = {}
    del values["reward"]["scorers"]["ocr"]  # an experiment names its scorers; ocr is the default only where none does
    return values


def hydra_overrides(override: str) -> list[str]:
    """An override for Hydra's own composition, which would merge `reward.scorers={...}` into the scorers there are."""
    if key_of(override) in CHOICES:
        return [override]
    override = readable(override)
    key, adds = key_of(override), override.startswith("+") and not override.startswith("++")
    if override[:1] == "~" or adds or not (key == WHOLE or key.startswith(f"{WHOLE}.")):
        return [override]
    forced = "++" + override.removeprefix("++")  # the block is no longer free once it was replaced
    return [f"{WHOLE}=null", forced] if key == WHOLE else [forced]


def is_hydra(override: Override) -> bool:
    """Whether it is a setting of Hydra's own."""
    return override.key_or_group.replace("/", ".").split(".")[0] == "hydra"


def set_hydra(composed: DictConfig, override: Override) -> None:
    """Set a key of Hydra's own; raises `ConfigError`."""
    key = override.key_or_group
    try:
        OmegaConf.update(composed, key, override.value(), merge=True, force_add=override.is_force_add())
    except (ConfigAttributeError, ConfigKeyError):
        raise ConfigError(f"{key}: there is no such key{_near_of_hydra(key)}; {LISTED}") from None
    except OmegaConfBaseException:
        raise ConfigError(f"{override.input_line}: this key takes a value of another kind") from None


def _near_of_hydra(name: str) -> str:
    if name.startswith(("hydra.sweeper.", "hydra.launcher.")):
        kind = name.split(".")[1]
        return f" of Hydra's own {kind}; use that of a plugin, such as hydra/{kind}={PLUGINS[kind]}"
    return f", did you mean {difflib.get_close_matches(name, (FOLDER, SWEEPS), n=1, cutoff=0)[0]!r}"


@contextlib.contextmanager
def sentences(chosen: Sequence[str] = ()) -> Iterator[None]:
    """Turn what Hydra raises while it composes files into a `ConfigError` of one sentence; `chosen`: the files."""
    try:
        yield
    except MissingConfigException as error:
        raise ConfigError(_missing(str(error.missing_cfg_file or ""), chosen)) from None
    except (HydraException, OmegaConfBaseException, ValueError, TypeError, AttributeError):
        raise ConfigError(
            f"{' and '.join(chosen) or 'the configuration'}: its files cannot be composed; below 'defaults:' list "
            "experiments as '- NAME', and an algorithm as '- override /algorithm: NAME'"
        ) from None
    except RecursionError:
        raise ConfigError(ENDLESS) from None


def _missing(file: str, chosen: Sequence[str]) -> str:
    """The sentence for a file that Hydra does not find."""
    group, _, name = file.partition("/")
    if group == "hydra":
        kind, _, name = name.partition("/")
        return f"hydra/{kind}={name}: Hydra has no such {kind} here; install its plugin, or remove it"
    own = next((o for o in chosen if not o.endswith(f"={name}")), "")
    where = f"{own}, in its defaults: " if own else ""
    return where + (no_such(group, name) if group in CHOICES else f"there is no file {file}; correct the name")


def resolved(values: dict[str, Any], whole: DictConfig) -> dict[str, Any]:
    """Nested `values` with what their `${...}` stand for; they take the place of gerl's blocks in `whole`.

    Raises `ConfigError` for one that stands for nothing, and for a value that is left open as `???`.
    """
    OmegaConf.set_struct(whole, False)
    try:
        for block in [str(name) for name in whole if name != "hydra" and name not in values]:
            del whole[block]
        for block, entries in values.items():
            whole[block] = entries
        plain = OmegaConf.to_container(OmegaConf.masked_copy(whole, list(values)), resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(_unresolved(error, values)) from None
    except RecursionError:
        raise ConfigError(ENDLESS) from None
    assert isinstance(plain, dict)
    return {str(name): value for name, value in plain.items()}


def _unresolved(error: OmegaConfBaseException, values: Mapping[str, Any]) -> str:
    """The sentence for a value with `${...}` in it, or for `???`, by the type of the error."""
    key = error.full_key or str(error.key or "a value")
    raw: Any = values
    for name in key.split("."):
        raw = raw.get(name) if isinstance(raw, Mapping) else None
    given = f"{key}={raw}" if raw is not None else key
    dollar = "write a literal dollar sign as '\\$'"
    match error:
        case MissingMandatoryValue():
            return f"{key}=???: the value is missing, set one"
        case InterpolationKeyError():
            name = str(raw).partition("${")[2].partition("}")[0]
            return f"{given}: there is no key {name!r} to refer to; {dollar}"
        case UnsupportedInterpolationType():
            return f"{given}: nothing with this name can be interpolated, use for example oc.env:NAME; {dollar}"
        case InterpolationResolutionError():
            return (
                f"{given}: it cannot be interpolated; set the environment variable that it names, or give a "
                f"default as in ${{oc.env:NAME,VALUE}}; {dollar}"
            )
        case GrammarParseError():
            return f"{given}: what begins with ${{ must end with }}; {dollar}"
    return f"{given}: it is not a number, string, list or dictionary; correct it"
