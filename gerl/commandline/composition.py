"""From the command line to a typed configuration, by Hydra."""

import contextlib
import dataclasses
import difflib
import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gerl.commandline.experiments import (
    CHOICES,
    NO_SCORERS,
    algorithm_of,
    config_folder,
    no_such,
    own_file,
    preset_of,
    shipped,
)
from gerl.commandline.form import check_form
from gerl.config import Config, ScorerConfig, did_you_mean, from_mapping, nearest_key, readers
from gerl.config.changes import settings_of
from gerl.errors import ConfigError

# their entries are set without Hydra's plus sign: dictionaries, and the block whose keys its algorithm decides
FREE = ("sampling.call", "reward.scorers", "data.columns", "algorithm")
# a source of prompts with a split, which Hydra takes for the beginning of a list
HUB_SOURCE = re.compile(r"""(?<!["'\w])hf:[^\s"'\[\]{},]+\[(?:[^"'\[\]]|\[[^"'\[\]]*\])+\]""")
PROMPTS = ("data.train", "validation.data")
TYPOGRAPHIC = re.compile("[\u2018-\u201f\u00ab\u00bb]")  # quotes
FOLDERS = ("hydra.run.dir", "hydra.sweep.dir")
PLUGINS = {"sweeper": "optuna", "launcher": "submitit_slurm"}
SCORERS = re.compile(r"(\+\+)?reward\.scorers(?P<entry>[.=])")  # set or changed; a single plus adds, ~ takes away


@dataclass(frozen=True)
class Composed:
    """A run as the command line asked for it."""

    config: Config
    experiment: str
    run_dir: Path
    preset: str = ""  # the `algorithm=NAME` it was composed with; empty: not known

    def yaml(self) -> str:
        """The whole configuration, for `config.yaml` of the run folder."""
        preset = {"preset": self.preset} if self.preset else {}
        values = {"experiment": self.experiment, **preset, **settings_of(self.config)}
        return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


@dataclass(frozen=True)
class Asked:
    """Where a command line wants a run to start from and to lie; the values of its keys are not checked."""

    resume: str  # `checkpoint.resume`
    experiment: str
    preset: str
    given: frozenset[str]  # the keys that it names
    run_dir: Path
    one_folder: bool  # `run_dir` does not depend on the time, so that no other folder can be meant
    values: dict[str, Any]
    composed: DictConfig | None  # by Hydra, of the whole command line; None if a part was left out


def compose_run(overrides: Sequence[str], asked: Asked | None = None) -> Composed:
    """Compose defaults, experiment and `overrides` (`experiment=NAME`, `key=value`); raises `ConfigError`.

    `experiment` may also be the path of a yaml file of your own. `asked`: what was read from `overrides` before.
    """
    with sentences():
        composed = asked.composed if asked is not None else None
        if composed is None:
            composed = _compose("config", {}, overrides)
        run_dir, values = _folder(composed.hydra.run.dir), _values(composed)
    choices, name = composed.hydra.runtime.choices, str(values["algorithm"]["name"])
    preset = str(choices.algorithm)
    if preset not in shipped("algorithm"):  # a file of the user's, found by --config-dir
        preset = ""
    elif algorithm_of(preset) != name:  # a file sets it over the preset of another one, of which it means nothing
        given = {_key(override) for override in overrides}
        unread = [
            key for key in map(str, preset_of(preset)) if name not in readers(key) and f"algorithm.{key}" not in given
        ]
        values["algorithm"] = {key: value for key, value in values["algorithm"].items() if key not in unread}
        preset = name
    return Composed(_config(values, overrides), str(choices.experiment), run_dir, preset)


def asked_for(overrides: Sequence[str]) -> Asked:
    """Read what a command line says about where its run starts from; nothing else is checked yet."""
    kept = [o for o in overrides if not o.startswith("~")]  # a run that is carried on may have no such key any more
    with sentences():
        composed = _compose("config", {}, kept)
        run_dir, values = _folder(composed.hydra.run.dir), _values(composed)
    block, choices = values["checkpoint"], composed.hydra.runtime.choices
    resume = block["resume"] if isinstance(block, dict) else "never"  # what is wrong with the block is said later
    if not isinstance(resume, str) or not resume.strip():
        raise ConfigError(
            f"checkpoint.resume={json.dumps(resume, default=str)}: give auto, never, or the folder of a run or of one "
            "of its checkpoints"
        )
    one_folder = "${now:" not in str(OmegaConf.to_container(composed.hydra.run, resolve=False))
    given = frozenset(map(_key, overrides))
    whole = composed if len(kept) == len(overrides) else None
    return Asked(resume, str(choices.experiment), str(choices.algorithm), given, run_dir, one_folder, values, whole)


def compose_changes(settings: Mapping[str, Any], overrides: Sequence[str]) -> Config:
    """The configuration of a run that exists, changed by `overrides`; raises `ConfigError`.

    What an override would add again is set, and what it would delete may be gone already: the command of the run, given
    again, changes nothing. Its experiment, its algorithm and where it lies are not looked at.
    """
    choices = ("experiment", "algorithm", "hydra.run.dir", "checkpoint.resume")
    kept = []
    for override in (o for o in overrides if _key(o) not in choices):
        if override.startswith("~") and not _has(settings, _key(override)):
            continue
        kept.append(f"+{override}" if override.startswith("+") and not override.startswith("++") else override)
    with sentences():
        values = _values(_compose("gerl", settings, kept))
    return _config(values, kept)


def _compose(name: str, settings: Mapping[str, Any], overrides: Sequence[str]) -> DictConfig:
    """Hydra's composition of a configuration over the defaults and, block by block, over `settings`."""
    check_arguments(overrides)
    register(settings)
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        given = [part for override in overrides for part in hydra_overrides(own_file(override))]
        composed = compose(name, given, return_hydra_config=True)
    if name == "config":
        _check_algorithm(overrides, str(composed.algorithm.name))
    return composed


def check_arguments(overrides: Sequence[str]) -> None:
    """Raise `ConfigError` for arguments that are no `key=value`, or that choose an experiment or algorithm twice."""
    check_form(overrides, _nearest, "experiment")
    _check_choices(overrides)


def register(settings: Mapping[str, Any]) -> None:
    """Make the defaults, block by block changed by `settings`, known to Hydra as `gerl`."""
    ConfigStore.instance().store("gerl", _schema(settings) if settings else _defaults())
    ConfigStore.instance().store(NO_SCORERS, {"reward": {"scorers": None}}, group="experiment", package="_global_")


def _schema(settings: Mapping[str, Any]) -> DictConfig:
    defaults = dataclasses.asdict(Config())
    defaults["algorithm"] = {}  # an algorithm's own defaults are those of its class
    del defaults["reward"]["scorers"]["ocr"]  # an experiment names its scorers; ocr is the default only where none does
    schema = OmegaConf.create({block: {**values, **settings.get(block, {})} for block, values in defaults.items()})
    for free in FREE:
        OmegaConf.set_struct(OmegaConf.select(schema, free), False)
    return schema


@functools.cache
def _defaults() -> DictConfig:
    return _schema({})  # composing does not change it: Hydra works on copies


@contextlib.contextmanager
def sentences() -> Iterator[None]:
    """Turn what Hydra raises into a `ConfigError` of one sentence."""
    try:
        yield
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(_sentence(error)) from None
    except RecursionError:
        raise ConfigError("a value has mappings or lists inside each other without end: use fewer") from None


def _config(values: dict[str, Any], overrides: Sequence[str]) -> Config:
    replaced = any(match["entry"] == "=" for override in overrides if (match := SCORERS.match(override)))
    if isinstance(values["reward"], dict) and not values["reward"]["scorers"] and not replaced:
        values["reward"]["scorers"] = {"ocr": dataclasses.asdict(ScorerConfig())}
    model = values["model"]
    if isinstance(model, dict) and model["train"] != "lora" and "model.lora_targets" not in map(_key, overrides):
        model["lora_targets"] = None  # the experiment's, for a LoRA that there is not
    return from_mapping(values)


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


def _has(settings: Mapping[str, Any], key: str) -> bool:
    """Whether nested settings have `key`, of the form `block.name` or longer."""
    inner: Any = settings
    for name in key.split("."):
        if not isinstance(inner, Mapping) or name not in inner:
            return False
        inner = inner[name]
    return True


def _folder(given: str | None) -> Path:
    if not given:
        raise ConfigError("hydra.run.dir is empty: give a folder for the run, or leave the key out")
    return Path(given)


def _values(composed: DictConfig) -> dict[str, Any]:
    own = OmegaConf.masked_copy(composed, [str(name) for name in composed if name != "hydra"])
    plain = OmegaConf.to_container(own, resolve=True, throw_on_missing=True)
    assert isinstance(plain, dict)
    return {str(name): value for name, value in plain.items()}


def hydra_overrides(override: str) -> list[str]:
    """An override as Hydra takes it: it would merge `reward.scorers={...}` into the scorers there are."""
    match = SCORERS.match(override)
    if _key(override) in PROMPTS:
        return [HUB_SOURCE.sub(lambda source: f"'{source[0]}'", override)]
    if match is None:
        return [override]
    forced = "++" + override.removeprefix("++")  # the block is no longer free once it was replaced
    return ["reward.scorers=null", forced] if match["entry"] == "=" else [forced]


def _nearest(name: str) -> str | None:
    """As `nearest_key`, with the names that are no keys of the configuration."""
    others = (*CHOICES, *FOLDERS)
    return name if name in others else nearest_key(name)


def _check_choices(overrides: Sequence[str]) -> None:
    """One experiment and one algorithm: Hydra would take the last and say nothing of the others."""
    for group in CHOICES:
        given = dict.fromkeys(o for o in overrides if o.startswith((f"{group}=", f"{group}.name=")))
        if sum(o.startswith(f"{group}=") for o in given) > 1 or len(given) > 2:
            raise ConfigError(f"{' and '.join(given)} are both given: keep one")
        if any(not o.partition("=")[2].strip() for o in given):
            raise ConfigError(f"{group} is empty: choose one of {', '.join(shipped(group))}")


def _check_algorithm(overrides: Sequence[str], name: str) -> None:
    """`algorithm=NAME` must not be overruled by a key, or an experiment that sets it (a run's config.yaml does)."""
    for override in overrides:
        key, _, value = override.partition("=")
        if key == "algorithm" and value in shipped("algorithm"):
            if algorithm_of(value) == name:
                continue
            if f"algorithm.name={name}" in overrides:
                raise ConfigError(f"algorithm={value} and algorithm.name={name} are two algorithms: keep one of them")
            raise ConfigError(
                f"algorithm={value}: the experiment sets algorithm.name={name}, which wins: remove it there"
            )


def _sentence(error: Exception) -> str:
    """An error of Hydra in one sentence with a remedy."""
    text = str(error)
    if isinstance(error, OverrideParseException):
        return _unreadable(str(error.override).removeprefix("++"))
    if match := re.search(r"Ambiguous value for argument '([^']+)'", text):
        hint = (
            "write a list as [1,2], a number with a point as in 0.5, and quote a text with a comma, as in \"'a, b'\"; "
        )
        hint += "-m trains once with each of several values"
        return f"{match[1]}: expected one value; {hint}"
    if match := re.search(r"Could not override '([^']+)'", text):
        name = match[1].split("@")[0]
        near = _near_of_hydra(name) if name.startswith("hydra") else did_you_mean(name)
        return f"{name}: there is no such key{near}; --help all lists all"
    if match := re.search(r"Could not append to config. An item is already at '([^']+)'", text):
        return f"+{match[1]}: the key exists, set it without the plus sign"
    if match := re.search(r"Interpolation key '([^']+)' not found\s+full_key: (\S+)", text):
        return (
            f"{match[2]}=${{{match[1]}}}: there is no key {match[1]!r} to refer to; write a plain dollar sign as '\\$'"
        )
    if match := re.search(r"Error merging override (.+)", text):
        return f"{match[1]}: this key takes a value of another kind; --help all shows its default"
    if match := re.search(r"Could not find 'hydra/(\w+)/([^']+)'", text):
        return f"hydra/{match[1]}={match[2]}: Hydra has no such {match[1]} here; install its plugin, or leave it out"
    if match := re.search(r"Could not find '(\w+)/([^']+)'", text):
        return no_such(match[1], match[2])
    return " ".join(text.split())


def _near_of_hydra(name: str) -> str:
    if name.startswith(("hydra.sweeper.", "hydra.launcher.")):
        kind = name.split(".")[1]
        return f" of Hydra's own {kind}; give that of a plugin, such as hydra/{kind}={PLUGINS[kind]}"
    return f", did you mean {difflib.get_close_matches(name, FOLDERS, n=1, cutoff=0)[0]!r}"


def _unreadable(override: str) -> str:
    """The sentence for an argument with an equals sign that Hydra cannot read."""
    name, _, value = override.partition("=")
    key = _nearest(re.sub(r"[^\w.]+|\.{2,}", ".", name.lstrip("+~")).strip("."))
    if key is not None and key != name.lstrip("+~"):
        return f"{override}: expected key=value, did you mean {key!r}; --help all lists the keys"
    if value.startswith("="):
        return f"{override}: one equals sign is enough, write {name}={value.lstrip('=')}"
    plain = TYPOGRAPHIC.sub("", value)
    if plain not in ("", value) and _fits(f"{name}={plain}"):
        return f"{override}: typographic quotes are no quotes here, write {name}={plain}"
    if any(value.count(opening) != value.count(closing) for opening, closing in ("[]", "{}")):
        return f"{override}: a bracket is not closed, or not opened; write lists as [1,2] and dictionaries as {{a: 1}}"
    quoted = f"{name}='{value}'"
    hint = f'if its value is meant as a text, quote it twice, "{quoted}"' if "'" not in value else "correct its quotes"
    return f"{override}: expected key=value; {hint}; --help all lists the keys"


def _fits(override: str) -> bool:
    """Whether Hydra can read it."""
    try:
        OverridesParser.create().parse_override(override)
    except OverrideParseException:
        return False
    return True
