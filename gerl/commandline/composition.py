"""From the command line to a typed configuration.

Hydra composes the files that `experiment=` and `algorithm=` choose (`hydra_seam`) and reads the values of arguments
(`overrides`); keys are set in what comes of that, as plain dictionaries, and checked by `gerl.config`.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from gerl.commandline.experiments import CHOICES, SUFFIXES, algorithm_of, default_experiment, preset_of, shipped
from gerl.commandline.form import check_form
from gerl.commandline.hydra_seam import FOLDER, SWEEPS, compose_files, defaults, is_hydra, resolved
from gerl.commandline.overrides import WHOLE, check_one_value, key_of, read, set_keys
from gerl.config import Config, ScorerConfig, from_mapping, nearest_key, readers
from gerl.config.changes import settings_of
from gerl.config.reading import typed
from gerl.errors import ConfigError

OUT = "out"  # short for hydra.run.dir


@dataclass(frozen=True)
class Composed:
    """A run as the command line asked for it."""

    config: Config
    experiment: str
    run_dir: Path
    preset: str = ""  # the `algorithm=NAME` it was composed with; empty: not known
    kept: str = ""  # what is there beside the scorers that were named, in one sentence; empty: nothing

    def yaml(self) -> str:
        """The whole configuration, for `config.yaml` of the run folder."""
        preset = {"preset": self.preset} if self.preset else {}
        values = {"experiment": self.experiment, **preset, **settings_of(self.config)}
        return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


@dataclass(frozen=True)
class Asked:
    """Where a command line wants a run to start from and to lie; the values of its keys are not checked."""

    experiment: str
    preset: str
    run_dir: Path
    one_folder: bool  # `run_dir` does not depend on the time, so that no other folder can be meant
    values: dict[str, Any]
    given: frozenset[str]  # the keys that it names
    resume: str = "never"  # `checkpoint.resume`
    whole: bool = True  # nothing of the command line was left out


def compose_run(overrides: Sequence[str], asked: Asked | None = None, below: Sequence[str] = ()) -> Composed:
    """Compose defaults, experiment and `overrides` (`experiment=NAME`, `key=value`); raises `ConfigError`.

    `experiment` may also be the path of a yaml file of your own. `asked`: what was read from `overrides` before.
    `below`: keys that `overrides` may set otherwise.
    """
    overrides = normal(overrides)
    found = asked if asked is not None and asked.whole else _compose(overrides, below)
    values, preset, name = deepcopy(found.values), found.preset, str(found.values["algorithm"]["name"])
    if preset not in shipped("algorithm"):  # a file of the user's, found by --config-dir
        preset = ""
    elif algorithm_of(preset) != name:  # a file sets it over the preset of another one, of which it means nothing
        unread = [
            key
            for key in map(str, preset_of(preset))
            if name not in readers(key) and f"algorithm.{key}" not in found.given
        ]
        values["algorithm"] = {key: value for key, value in values["algorithm"].items() if key not in unread}
        preset = name
    config = _config(values, [*below, *overrides])
    return Composed(config, found.experiment, found.run_dir, preset, _kept(config, found.experiment, overrides))


def asked_for(overrides: Sequence[str]) -> Asked:
    """Read what a command line says about where its run starts from; nothing else is checked yet."""
    given = frozenset(map(key_of, (normal([o])[-1] for o in overrides)))  # not the experiment that is understood
    overrides = normal(overrides)
    kept = [o for o in overrides if not o.startswith("~")]  # a run that is resumed may have no such key any more
    found = _compose(kept)
    block = found.values.get("checkpoint")
    resume = block.get("resume", "never") if isinstance(block, dict) else "never"  # what is wrong with it is said later
    if not isinstance(resume, str) or not resume.strip():
        raise ConfigError(
            f"checkpoint.resume={json.dumps(resume, default=str)}: expected auto, never, or the folder of a run or "
            "of one of its checkpoints"
        )
    return dataclasses.replace(found, resume=resume, given=given, whole=len(kept) == len(overrides))


def compose_changes(settings: Mapping[str, Any], overrides: Sequence[str]) -> Config:
    """The configuration of a run that exists, changed by `overrides`; raises `ConfigError`.

    What an override would add again is set, and what it would delete may be gone already: the command of the run, given
    again, changes nothing. Its experiment, its algorithm and where it lies are not looked at.
    """
    overrides = normal(overrides)
    check_arguments(overrides)
    left_out = (*CHOICES, FOLDER, "checkpoint.resume")
    kept = [override for override in overrides if key_of(override) not in left_out]
    values = {block: {**entries, **settings.get(block, {})} for block, entries in defaults().items()}
    set_keys(values := deepcopy(values), [read(override) for override in kept], again=True)
    return _config(resolved(values, OmegaConf.create()), kept)


def normal(overrides: Sequence[str], folder: str = FOLDER) -> list[str]:
    """The arguments with what is understood: `out=` is `folder`, and a model of one's own has no experiment's keys.

    The experiment signs has the size, the steps and the LoRA of the small model that ships with gerl.
    """
    found = [f"{folder}={o.removeprefix('out=')}" if o.startswith(f"{OUT}=") else o for o in overrides]
    models = [o.partition("=")[2] for o in found if o.startswith("model.path=")]
    named = any(key_of(o) == "experiment" for o in found)
    if not models or named or default_experiment(models[0]) == default_experiment(None):
        return found
    return [f"experiment={default_experiment(models[0])}", *found]


def _compose(overrides: Sequence[str], below: Sequence[str] = ()) -> Asked:
    """The defaults, the files that are chosen, and the keys; `ConfigError` for what cannot be composed."""
    check_arguments(overrides)
    chosen = [o for o in overrides if key_of(o) in CHOICES]
    if several := next((o for o in chosen if "," in o and not o.endswith(SUFFIXES)), None):
        raise ConfigError(f"{several}: a run has one {key_of(several)}; -m trains once with each of several")
    given = [read(o) for o in overrides if o not in chosen]
    files = compose_files(chosen, given)
    set_keys(files.values, [read(o) for o in below])
    set_keys(files.values, [o for o in given if not is_hydra(o)])
    values = resolved(files.values, files.whole)
    _check_algorithm(values, chosen, overrides)
    keys = frozenset(map(key_of, overrides))
    return Asked(files.experiment, files.algorithm, files.run_dir(), files.one_folder, values, keys)


def check_arguments(overrides: Sequence[str]) -> None:
    """Raise `ConfigError` for arguments that are no `key=value`, and for keys that are given twice."""
    check_form(overrides, _nearest, "experiment")
    _check_choices(overrides)
    check_one_value([read(o) for o in overrides if key_of(o) not in CHOICES])


def _config(values: dict[str, Any], overrides: Sequence[str]) -> Config:
    replaced = any(key_of(override) == WHOLE and override[:1] not in "+~" for override in overrides)
    replaced |= any(override.startswith(f"++{WHOLE}=") for override in overrides)
    reward, model = values.get("reward"), values.get("model")
    if isinstance(reward, dict) and not reward.get("scorers") and not replaced:
        reward["scorers"] = {"ocr": dataclasses.asdict(ScorerConfig())}
    is_lora = not isinstance(model, dict) or model.get("train", "lora") == "lora"
    if isinstance(model, dict) and not is_lora and "model.lora_targets" not in map(key_of, overrides):
        model["lora_targets"] = None  # the experiment's, for a LoRA that there is not
    return from_mapping(values)


def _kept(config: Config, experiment: str, overrides: Sequence[str]) -> str:
    """Scorers of the default experiment beside those that a command line names, and how to have these alone."""
    keys = [key_of(override) for override in overrides if not override.startswith("~")]
    named = [key.split(".")[2] for key in keys if key.startswith(f"{WHOLE}.")]
    named = [name for name in dict.fromkeys(named) if name in config.reward.scorers]
    own = [name for name in named if config.reward.scorers[name].path is not None]
    others = [name for name in config.reward.scorers if name not in named]
    if "experiment" in keys or WHOLE in keys or not own or not others:
        return ""
    default = ScorerConfig()
    alone = {
        name: {
            f.name: getattr(config.reward.scorers[name], f.name)
            for f in dataclasses.fields(ScorerConfig)
            if getattr(config.reward.scorers[name], f.name) != getattr(default, f.name)
        }
        for name in named
    }
    return (
        f"the reward also has {' and '.join(others)}, of the default experiment={experiment}; for "
        f"{' and '.join(alone)} alone write {typed({WHOLE: alone})}"
    )


def _nearest(name: str) -> str | None:
    """As `nearest_key`, with the names that are no keys of the configuration."""
    others = (*CHOICES, FOLDER, SWEEPS, OUT)
    return name if name in others else nearest_key(name)


def _check_choices(overrides: Sequence[str]) -> None:
    """One experiment and one algorithm: Hydra would take the last and say nothing of the others."""
    for group in CHOICES:
        given = list(dict.fromkeys(o for o in overrides if key_of(o) == group))
        if signed := next((o for o in given if o[0] in "+~"), None):
            names = ", ".join(shipped(group))
            raise ConfigError(f"{signed}: a run has one {group}; write {group}=NAME, one of {names}")
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} are both given: keep one")
        if any(not o.partition("=")[2].strip() for o in given):
            raise ConfigError(f"{group} is empty: choose one of {', '.join(shipped(group))}")


def _check_algorithm(values: dict[str, Any], chosen: Sequence[str], overrides: Sequence[str]) -> None:
    """There is one algorithm: `algorithm=NAME` must not be overruled by a key, or an experiment that sets it."""
    block = values.get("algorithm")
    given = next((o for o in chosen if o.startswith("algorithm=")), "")
    if not isinstance(block, dict) or not isinstance(name := block.get("name"), str):
        raise ConfigError(
            f"{given or 'algorithm'}: there is no algorithm.name; choose one with algorithm=NAME, and in your own "
            "file write 'algorithm:', and indented below it 'name: flow_grpo'"
        )
    value = given.partition("=")[2]
    if value not in shipped("algorithm") or algorithm_of(value) == name:
        return  # a run's config.yaml sets it
    if f"algorithm.name={name}" in overrides:
        raise ConfigError(f"algorithm={value} and algorithm.name={name} are different algorithms: keep one of them")
    raise ConfigError(
        f"algorithm={value}: the experiment sets algorithm.name={name}, which takes precedence: remove it there"
    )
