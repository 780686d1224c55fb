"""Compose a typed configuration from the command line: Hydra's options, overrides, experiments, presets."""

import contextlib
import dataclasses
import difflib
import functools
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, ListConfig, OmegaConf, errors
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError

from gerl.commandline.form import check_form, either, near_names, read_yaml
from gerl.commandline.samplers import check_scheduler, settle_sampler
from gerl.config import LISTED, Config, ScorerConfig, did_you_mean, from_mapping, nearest_key, readers, registry, shown
from gerl.config.algorithms import with_own_name
from gerl.config.blocks import HELD_OUT
from gerl.config.bounded_text import load_yaml, read_values
from gerl.config.changes import settings_of
from gerl.config.reading import typed
from gerl.config.registry import ALGORITHMS
from gerl.config.roles import check_roles
from gerl.config.samplers import AUTO
from gerl.config.suggestions import other_value
from gerl.config.user_files import check_trusted
from gerl.errors import ConfigError, TrustError

FREE = (
    "sampling.call",
    "model.parts",
    "reward.scorers",
    "data.columns",
    "algorithm",
)  # blocks to which a sweep may add keys
RUN_DIR, SWEEPS = "hydra.run.dir", "hydra.sweep.dir"
GROUPS = ("launcher", "sweeper", "env", "help", "hydra_help", "hydra_logging", "job_logging", "output")
PLUGINS = {"sweeper": "optuna", "launcher": "submitit_slurm"}
ENDLESS = "a value has endlessly nested mappings or lists: use fewer"


def compose_files(chosen: Sequence[str], overrides: Sequence[Override], replacing: bool = True) -> DictConfig:
    """Compose the `chosen` files with the Hydra settings in `overrides`; raises `ConfigError`.

    `replacing`: the scorers of a file of the user replace those of its `defaults`; else they are merged.
    """
    for override in filter(is_hydra, overrides):
        group = override.key_or_group
        if override.is_delete() or group == "hydra":
            raise ConfigError(
                f"{override.input_line}: Hydra's own settings are set one by one, and none can be removed; give "
                f"{RUN_DIR}=FOLDER, or omit it"
            )
        if group.startswith("hydra/") and group.removeprefix("hydra/") not in GROUPS:
            raise ConfigError(f"{group}: there is no such key; there are hydra/{', hydra/'.join(GROUPS)}; {LISTED}")
    register(replacing)
    GlobalHydra.instance().clear()
    with sentences(chosen), initialize_config_dir(str(config_folder()), version_base="1.3"):
        files = [own_file(override).partition("=") for override in chosen]
        names = [f"{group}={name if name.isascii() else quoted(name)}" for group, _, name in files]
        groups = [o.input_line or "" for o in overrides if o.key_or_group.startswith("hydra/")]
        whole = compose("config", [*names, *groups], return_hydra_config=True)
    for override in (o for o in overrides if o.key_or_group.startswith("hydra.")):
        set_hydra(whole, override)
    return whole


def _blocks(composed: DictConfig, names: Sequence[str], resolve: bool) -> dict[str, Any]:
    """Return blocks as plain values; `resolve`: also their interpolations, and a missing value `???` is an error."""
    blocks = OmegaConf.masked_copy(composed, list(names))
    values = OmegaConf.to_container(blocks, resolve=resolve, throw_on_missing=resolve)
    assert isinstance(values, dict)
    return {str(name): value for name, value in values.items()}


def register(replacing: bool = True) -> None:
    """Register the defaults with Hydra as `gerl`; `replacing`: as in `compose_files`."""
    schema = OmegaConf.create(defaults())
    for free in FREE:
        OmegaConf.set_struct(OmegaConf.select(schema, free), False)
    ConfigStore.instance().store("gerl", schema)
    none = {"reward": {"scorers": None} if replacing else {}}
    ConfigStore.instance().store(NO_SCORERS, none, group="experiment", package="_global_")


@functools.cache
def defaults() -> dict[str, Any]:
    """Return the default of every key except the algorithm's, which its class has; must not be modified."""
    values = dataclasses.asdict(Config())
    values["algorithm"] = {}
    values["sampling"]["kernel"] = AUTO
    return values


def hydra_overrides(override: str) -> list[str]:
    """Adapt an override to Hydra's composition, which would merge `reward.scorers={...}` into the default scorers."""
    if key_of(override) in CHOICES:
        return [override]
    override = readable(override)
    key, adds = key_of(override), override.startswith("+") and not override.startswith("++")
    if override[:1] == "~" or adds or not (key == WHOLE or key.startswith(f"{WHOLE}.")):
        return [override]
    forced = "++" + override.removeprefix("++")  # a replaced block accepts no further keys
    return [f"{WHOLE}=null", forced] if key == WHOLE else [forced]


def is_hydra(override: Override) -> bool:
    """Whether a key is a setting of Hydra."""
    return override.key_or_group.replace("/", ".").split(".")[0] == "hydra"


def set_hydra(composed: DictConfig, override: Override) -> None:
    """Set a key of Hydra; raises `ConfigError`."""
    key = override.key_or_group
    try:
        OmegaConf.update(composed, key, override.value(), merge=True, force_add=override.is_force_add())
    except (errors.ConfigAttributeError, errors.ConfigKeyError):
        near = f", did you mean {difflib.get_close_matches(key, (RUN_DIR, SWEEPS), n=1, cutoff=0)[0]!r}"
        if key.startswith(("hydra.sweeper.", "hydra.launcher.")):
            kind = key.split(".")[1]
            near = f" of Hydra's own {kind}; use that of a plugin, such as hydra/{kind}={PLUGINS[kind]}"
        raise ConfigError(f"{key}: there is no such key{near}; {LISTED}") from None
    except OmegaConfBaseException:
        raise ConfigError(f"{override.input_line}: this key takes a value of another kind") from None


@contextlib.contextmanager
def sentences(chosen: Sequence[str] = ()) -> Iterator[None]:
    """Turn errors of Hydra's composition into a `ConfigError` of one sentence; `chosen`: the files."""
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
    group, _, name = file.partition("/")
    if group == "hydra":
        kind, _, name = name.partition("/")
        return f"hydra/{kind}={name}: Hydra has no such {kind} here; install its plugin, or remove it"
    setting = next((o for o in chosen if not o.endswith(f"={name}")), "")
    where = f"{setting}, in its defaults: " if setting else ""
    return where + (no_such(group, name) if group in CHOICES else f"there is no file {file}; correct the name")


def resolved(values: dict[str, Any], whole: DictConfig) -> dict[str, Any]:
    """Resolve the interpolations `${...}` in `values`, which replace gerl's blocks in `whole`; raises `ConfigError`."""
    OmegaConf.set_struct(whole, False)
    for key, value in ((key, v) for block, entries in values.items() for key, v in _texts(block, entries)):
        if "${" in value:
            check_trusted(key, value)
    try:
        for block in [str(name) for name in whole if name != "hydra" and name not in values]:
            del whole[block]
        for block, entries in values.items():
            whole[block] = entries
        return _blocks(whole, list(values), resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(_unresolved(error, values)) from None
    except RecursionError:
        raise ConfigError(ENDLESS) from None


def _unresolved(error: OmegaConfBaseException, values: Mapping[str, Any]) -> str:
    key = error.full_key or str(error.key or "a value")
    raw: Any = values
    for name in key.split("."):
        raw = raw.get(name) if isinstance(raw, Mapping) else None
    setting = f"{key}={raw}" if raw is not None else key
    dollar = "write a literal dollar sign as '\\$'"
    if isinstance(error, errors.MissingMandatoryValue):
        return f"{key}=???: the value is missing, set one"
    name = str(raw).partition("${")[2].partition("}")[0]
    reasons: dict[type[OmegaConfBaseException], str] = {  # subclasses first
        errors.InterpolationKeyError: f"there is no key {name!r} to refer to",
        errors.UnsupportedInterpolationType: "nothing with this name can be interpolated, use for example oc.env:NAME",
        errors.InterpolationResolutionError: "it cannot be interpolated; set the environment variable that it names, "
        "or give a default as in ${oc.env:NAME,VALUE}",
        errors.GrammarParseError: "what begins with ${ must end with }",
    }
    for kind, reason in reasons.items():
        if isinstance(error, kind):
            return f"{setting}: {reason}; {dollar}"
    return f"{setting}: it is not a number, string, list or dictionary; correct it"


# --- Composing a typed configuration: keys are set in what Hydra composed, as plain dictionaries, and checked

OUT = "out"  # short for hydra.run.dir


@dataclass(frozen=True)
class Composed:
    """The composed configuration of a run and its origin."""

    config: Config
    experiment: str
    run_dir: Path
    preset: str = ""  # the `algorithm=NAME` it was composed with; empty: not known
    kept: str = ""  # the sentence about default scorers beside the named ones; may be empty
    sampler: str = ""  # the sentence about what `auto` in the block `sampling` has become; may be empty
    replaced: Mapping[str, ScorerConfig] = field(default_factory=dict)  # of the experiment, replaced by the config's

    def yaml(self) -> str:
        """Return the whole configuration as written to `config.yaml`."""
        preset = {"preset": self.preset} if self.preset else {}
        values = {"experiment": self.experiment, **preset, **settings_of(self.config)}
        return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


@dataclass(frozen=True)
class ParsedCommand:
    """The origin and the folder of a run as given on the command line; other keys are not checked."""

    experiment: str
    preset: str
    run_dir: Path
    one_folder: bool  # `run_dir` is fixed, not named by the time
    values: dict[str, Any]
    given: frozenset[str]  # the keys that it names
    resume: str = "never"  # `checkpoint.resume`
    whole: bool = True  # no argument was dropped


def compose_run(overrides: Sequence[str], asked: ParsedCommand | None = None, below: Sequence[str] = ()) -> Composed:
    """Compose defaults, experiment and `overrides`, which outrank `below`; `asked`: the result of `asked_for`."""
    overrides = normal(overrides)
    parsed = asked if asked is not None and asked.whole else _compose(overrides, below)
    values, preset, name = deepcopy(parsed.values), parsed.preset, str(parsed.values["algorithm"]["name"])
    if preset not in shipped("algorithm"):  # a file of the user, found by --config-dir
        preset = ""
    elif algorithm_of(preset) != name:  # a file sets it above the preset of another algorithm
        unread = {key for key in map(str, preset_of(preset)) if name not in readers(key)}
        block = values["algorithm"].items()
        values["algorithm"] = {k: v for k, v in block if k not in unread or f"algorithm.{k}" in parsed.given}
        preset = preset if values["algorithm"].get("path") else name
    sampler = settle_sampler(values)
    config = _config(values, [*below, *overrides])
    others = _other_scorers(config, parsed.experiment, overrides)
    return Composed(config, parsed.experiment, parsed.run_dir, preset, others, sampler)


def load_config(experiment: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """Compose the checked configuration of a run, without starting one.

    `experiment`: name or YAML file, such as the `config.yaml` of a run; None: the signs demo. `overrides`: keys as on
    the command line, `["algorithm=diffusion_nft", "rollout.n=8"]`.

    Raises:
        ConfigError: unknown keys, wrong values, or values that exclude each other.
    """
    chosen = [] if experiment is None else [f"experiment={experiment}"]
    return compose_run([*chosen, *overrides]).config


def replaced_scorers(overrides: Sequence[str], asked: ParsedCommand) -> dict[str, ScorerConfig]:
    """Return the scorers of the experiment, and of files in its `defaults`, that others have replaced.

    Without those that `~reward.scorers.NAME`, or the value null, removes. `asked`: the result of `asked_for`.
    """
    overrides = normal(overrides)
    own_file = any(o.endswith(SUFFIXES) for o in overrides if key_of(o) == "experiment")
    if WHOLE not in map(key_of, overrides) and not own_file:
        return {}
    scorers = {}
    for name, scorer in _lost(_scorers_of_files(overrides), asked.values, overrides).items():
        if isinstance(scorer, dict):
            with contextlib.suppress(ValidationError, ConfigError):  # its value is no longer checked
                scorers[name] = TypeAdapter(ScorerConfig).validate_python(scorer)
    return scorers


def stays_watched(scorer: Mapping[str, Any]) -> bool:
    """Whether a scorer of a `config.yaml` is kept when the run is resumed with a reward that does not name it."""
    return scorer.get("weight") == 0 and scorer.get("during") == "validation"


def _lost(before: Mapping[str, Any], values: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return the scorers `before` that are not in `values`, although no override removes them by name."""
    removed = {key_of(o) for o in overrides if o.startswith("~")}
    left = values["reward"]["scorers"]
    if not left or WHOLE in removed:  # no scorers at all
        return {}
    return {name: s for name, s in before.items() if name not in left and f"{WHOLE}.{name}" not in removed}


def _scorers_of_files(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the scorers of the chosen files merged with those of their `defaults`, by name; None: removed by one."""
    whole = compose_files([o for o in overrides if key_of(o) in CHOICES], [], replacing=False)
    register()
    return dict(_blocks(whole, ["reward"], resolve=False)["reward"]["scorers"] or {})


def asked_for(overrides: Sequence[str]) -> ParsedCommand:
    """Read the origin and the folder of the run from a command line; nothing else is checked."""
    keys = frozenset(map(key_of, with_folder(overrides)))  # not the experiment that is understood
    overrides = normal(overrides)
    set_overrides = [o for o in overrides if not o.startswith("~")]  # the resumed run may not have the key
    parsed = _compose(set_overrides)
    block = parsed.values.get("checkpoint")
    resume = block.get("resume", "never") if isinstance(block, dict) else "never"  # its error is raised later
    if not isinstance(resume, str) or not resume.strip():
        raise ConfigError(
            f"checkpoint.resume={json.dumps(resume, default=str)}: expected auto, never, or the folder of a run or "
            "of one of its checkpoints"
        )
    return dataclasses.replace(parsed, resume=resume, given=keys, whole=len(set_overrides) == len(overrides))


def compose_changes(settings: Mapping[str, Any], overrides: Sequence[str]) -> Config:
    """Apply `overrides` to the configuration of an existing run, without those of experiment, preset and folder."""
    overrides = normal(overrides)
    check_arguments(overrides)
    left_out = (*CHOICES, RUN_DIR, "checkpoint.resume")
    chosen = [override for override in overrides if key_of(override) not in left_out]
    values = deepcopy({block: {**entries, **settings.get(block, {})} for block, entries in defaults().items()})
    set_keys(values, [read(override) for override in chosen], again=True)
    if isinstance(scorers := values["reward"]["scorers"], dict):  # a reward given again leaves what is watched
        lost = _lost(settings.get("reward", {}).get("scorers", {}), values, chosen)
        scorers |= {name: scorer for name, scorer in lost.items() if stays_watched(scorer)}
    values = resolved(values, OmegaConf.create())
    settle_sampler(values)
    return _config(values, chosen)


def normal(overrides: Sequence[str], folder: str = RUN_DIR) -> list[str]:
    """Normalise the arguments: `out=` becomes the folder, another model than that of the signs demo selects plain."""
    arguments = with_folder(overrides, folder)
    algorithm, chosen = load_own_algorithm(arguments), {key_of(o) for o in arguments} & set(CHOICES)
    if algorithm is not None and not chosen:
        arguments = [f"algorithm={registry.preset_of(algorithm)}", *arguments]
    models = [o.partition("=")[2] for o in arguments if o.startswith("model.path=")]
    named = any(key_of(o) == "experiment" for o in arguments)
    if not models or named or default_experiment(models[0]) == default_experiment(None):
        return arguments
    return [f"experiment={default_experiment(models[0])}", *arguments]


def with_folder(overrides: Sequence[str], folder: str = RUN_DIR) -> list[str]:
    """Replace `out`, the short name of the key `folder`."""
    return [f"{folder}={o.removeprefix('out=')}" if o.startswith(f"{OUT}=") else o for o in overrides]


def load_own_algorithm(overrides: Sequence[str]) -> Any:
    """Load the class of `algorithm.path`, also of a run that is resumed, so that its keys are known; None without."""
    by_key = {key_of(o): o for o in overrides}
    if registry.KEY in by_key:
        path = read(by_key[registry.KEY]).value()
        return ALGORITHMS.load(path) if isinstance(path, str) else None
    run = Path(by_key.get("checkpoint.resume", "").partition("=")[2]).expanduser()
    files = [folder / "config.yaml" for folder in (run, *run.parents[:2])]  # of a run or of a checkpoint
    file = next((file for file in files if "checkpoint.resume" in by_key and file.is_file()), None)
    settings = None
    with contextlib.suppress(OSError, yaml.YAMLError):  # a damaged file is an error of the run to resume
        settings = read_values(file, "replace") if file else None
    block = settings.get("algorithm") if isinstance(settings, dict) else None
    if file is None or not isinstance(block, dict) or not isinstance(block.get("path"), str):
        return None
    return ALGORITHMS.load(path_to_run(block["path"], file.parent))


def path_to_run(path: str, run_dir: Path) -> str:
    """Return the `algorithm.path` of a run to resume; raises `TrustError` if only the copy in its folder is left."""
    copy = path_or_copy(path, run_dir)
    if copy != path:
        digest = hashlib.sha256(Path(copy).read_bytes()).hexdigest()
        raise TrustError(
            f"algorithm.path={path}: the file is gone; beside the run's config.yaml is {copy} (SHA-256 {digest}): read "
            f"it, and give algorithm.path={copy} to run it instead"
        )
    return path


def path_or_copy(path: str, run_dir: Path) -> str:
    """Return the `algorithm.path` of a run, or that of the copy in its folder if the file is gone."""
    gone = not path.startswith(registry.PREFIX) and not Path(path).is_file()
    copy = run_dir / Path(path).name
    return str(copy.absolute()) if gone and copy.is_file() else path


def _compose(overrides: Sequence[str], below: Sequence[str] = ()) -> ParsedCommand:
    """The defaults, the files that are chosen, and the keys; `ConfigError` for what cannot be composed."""
    check_arguments(overrides)
    chosen = [o for o in overrides if key_of(o) in CHOICES]
    if several := next((o for o in chosen if "," in o and not o.endswith(SUFFIXES)), None):
        raise ConfigError(f"{several}: a run has one {key_of(several)}; -m trains once with each of several")
    parsed = [read(o) for o in overrides if o not in chosen]
    whole = compose_files(chosen, parsed)
    with sentences(chosen):
        values = _blocks(whole, [str(name) for name in whole if name != "hydra"], resolve=False)
    set_keys(values, [read(o) for o in below])
    there = _scorers_of_files(overrides) if any(o.startswith(f"~{WHOLE}.") for o in overrides) else ()
    trained = deepcopy(values["data"]["train"])
    set_keys(values, [o for o in parsed if not is_hydra(o)], removable=[f"{WHOLE}.{name}" for name in there])
    held_out, train = values.get("validation", {}), values.get("data", {}).get("train")
    if train not in (None, trained) and held_out.get("data") and "validation.data" not in map(key_of, overrides):
        held_out["data"] = HELD_OUT  # the experiment's are not of these prompts
    values = resolved(values, whole)
    _check_algorithm(values, chosen, overrides)
    values["algorithm"] = with_own_name(values["algorithm"])
    choices = whole.hydra.runtime.choices
    one_folder = "${now:" not in str(OmegaConf.to_container(whole.hydra.run, resolve=False))
    keys = frozenset(map(key_of, overrides))
    try:
        run_dir = whole.hydra.run.dir
    except OmegaConfBaseException as error:
        raise ConfigError(_unresolved(error, {"hydra": OmegaConf.to_container(whole.hydra)})) from None
    if not run_dir:
        raise ConfigError(f"{OUT} ({RUN_DIR}) is empty: give a folder for the run, or omit the key")
    return ParsedCommand(str(choices.experiment), str(choices.algorithm), Path(run_dir), one_folder, values, keys)


def check_arguments(overrides: Sequence[str]) -> None:
    """Raise `ConfigError` for arguments other than `key=value`, and for keys given twice."""
    check_form(overrides, _nearest, "experiment")
    _check_choices(overrides)
    _check_one_value([read(o) for o in overrides if key_of(o) not in CHOICES])


def _config(values: dict[str, Any], overrides: Sequence[str]) -> Config:
    reward, model = values.get("reward"), values.get("model")
    if isinstance(reward, dict) and isinstance(scorers := reward.get("scorers"), dict):
        reward["scorers"] = {name: scorer for name, scorer in scorers.items() if scorer is not None}  # null: removed
    is_lora = not isinstance(model, dict) or model.get("train", "lora") == "lora"
    if isinstance(model, dict) and not is_lora and "model.lora_targets" not in map(key_of, overrides):
        model["lora_targets"] = None  # the experiment's, for a LoRA that there is not
    config = from_mapping(values)
    check_roles(config)
    check_scheduler(config)
    return config


def _other_scorers(config: Config, experiment: str, overrides: Sequence[str]) -> str:
    """Return the sentence about scorers of the default experiment that stay beside the named ones."""
    keys = [key_of(override) for override in overrides if not override.startswith("~")]
    named = [key.split(".")[2] for key in keys if key.startswith(f"{WHOLE}.")]
    named = [name for name in dict.fromkeys(named) if name in config.reward.scorers]
    custom = [name for name in named if config.reward.scorers[name].path is not None]
    others = [name for name, scorer in config.reward.scorers.items() if name not in named and scorer.weight]
    if "experiment" in keys or WHOLE in keys or not custom or not others:
        return ""
    default = dataclasses.asdict(ScorerConfig())
    scorers = {name: dataclasses.asdict(config.reward.scorers[name]) for name in named}
    alone = {name: {k: v for k, v in scorer.items() if v != default[k]} for name, scorer in scorers.items()}
    return (
        f"the reward also has {' and '.join(others)}, of the default experiment={experiment}; for "
        f"{' and '.join(alone)} alone write {typed({WHOLE: alone})}"
    )


def _nearest(name: str) -> str | None:
    others = (*CHOICES, RUN_DIR, SWEEPS, OUT)
    return name if name in others else nearest_key(name)


def _check_choices(overrides: Sequence[str]) -> None:
    """Raise `ConfigError` for several experiments or algorithms, of which Hydra silently takes the last."""
    for group in CHOICES:
        choices = list(dict.fromkeys(o for o in overrides if key_of(o) == group))
        if signed := next((o for o in choices if o[0] in "+~"), None):
            names = ", ".join(shipped(group))
            raise ConfigError(f"{signed}: a run has one {group}; write {group}=NAME, one of {names}")
        if len(choices) > 1:
            raise ConfigError(f"{' and '.join(choices)} are both given: keep one")
        if any(not o.partition("=")[2].strip() for o in choices):
            raise ConfigError(f"{group} is empty: choose one of {', '.join(shipped(group))}")


def _check_algorithm(values: dict[str, Any], chosen: Sequence[str], overrides: Sequence[str]) -> None:
    block = values.get("algorithm")
    setting = next((o for o in chosen if o.startswith("algorithm=")), "")
    if not isinstance(block, dict) or not isinstance(name := block.get("name"), str):
        raise ConfigError(
            f"{setting or 'algorithm'}: there is no algorithm.name; choose one with algorithm=NAME, and in your own "
            "file write 'algorithm:', and indented below it 'name: flow_grpo'"
        )
    value = setting.partition("=")[2]
    if value not in shipped("algorithm") or algorithm_of(value) == name or block.get("path"):
        return  # a run's config.yaml sets it, or a file of the user has the algorithm
    if f"algorithm.name={name}" in overrides:
        raise ConfigError(f"algorithm={value} and algorithm.name={name} are different algorithms: keep one of them")
    raise ConfigError(f"{setting}: the experiment sets algorithm.name={name}, which takes precedence: remove it there")


# --- Experiments and algorithm presets: shipped ones and files of the user

PACKAGE = Path(__file__).resolve().parents[1]
CHOICES = ("experiment", "algorithm")  # groups whose files are selected by NAME=VALUE
NO_SCORERS = "_no_scorers"  # composed between an experiment that names its scorers and what that is based on
SUFFIXES = (".yaml", ".yml")


def config_folder() -> Path:
    """Return the folder of the shipped yaml files: inside an installed package, beside it in a checkout."""
    installed = PACKAGE / "configs"
    return installed if installed.is_dir() else PACKAGE.parent / "configs"


def own_file(override: str) -> str:
    """Register the file of `experiment=PATH` or `algorithm=PATH` with Hydra; returns the override by name."""
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
    """Return a file's name without characters that Hydra would need quoted or that do not suit a folder."""
    return re.sub(r"[^\w.-]", "_", path.stem)


def _make_known(path: Path, group: str, name: str, where: str, groups: list[tuple[Path, str]]) -> None:
    """Register a file as `group/name` with Hydra, and the user's files in its `defaults`; `groups`: those done."""
    if (path, name) in groups:
        return
    groups.append((path, name))
    content = read_yaml(path, where)
    if group == "experiment":
        for key in ("experiment", "preset"):  # `config.yaml` of a run names its origin by them
            content.pop(key, None)
    for key in map(str, content):
        block, dot, leaf = key.partition(".")
        if dot:
            raise ConfigError(f"{where}: {key} has a dot; in a file write '{block}:', and indented below it '{leaf}:'")
    defaults = content.get("defaults")
    for i, entry in enumerate(defaults if isinstance(defaults, ListConfig) else ()):
        pairs: Any = entry.items() if isinstance(entry, DictConfig) else [("", entry)]
        for key, value in [(str(key), value) for key, value in pairs if isinstance(value, str)]:
            place = key.removeprefix("override ").strip("/") or group
            if value.endswith(SUFFIXES):
                defaults[i] = _by_path(value, key, place, path, where, groups)
            elif value != "_self_":
                _by_name(value, place, path, group, groups)
    own_scorers = group == "experiment" and OmegaConf.select(content, "reward.scorers") is not None
    if own_scorers and isinstance(defaults, ListConfig):  # they replace those of its `defaults`
        after = [i for i, e in enumerate(defaults) if e == "_self_" or str(next(iter(e))).startswith("override ")]
        defaults.insert(min(after, default=len(defaults)), NO_SCORERS)
    ConfigStore.instance().store(name, content, group=group, package="_global_")


def _by_path(value: str, key: str, place: str, path: Path, where: str, groups: list[tuple[Path, str]]) -> Any:
    """Register a file whose path, relative to the file `path`, is an entry of `defaults`; return the new entry."""
    file = (path.parent / Path(value).expanduser()).absolute()
    if not file.is_file():
        raise ConfigError(f"{where}: defaults lists {value}, but there is no such file {file}; correct the path there")
    name = f"{_plain(file)}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"  # gerl may have one of that name
    _make_known(file, place, name, str(file), groups)
    return {key: name} if key else name


def _by_name(value: str, place: str, path: Path, group: str, groups: list[tuple[Path, str]]) -> None:
    """Register the user's file that an entry of the `defaults` of the file `path` names, if gerl has none."""
    other, _, name = value.lstrip("/").rpartition("/")
    other = other or place
    folders = (path.parent,) if other == group else (path.parent / other, path.parents[1] / other)
    files = (folder / f"{name}{suffix}" for folder in folders for suffix in SUFFIXES)
    if name not in shipped(other) and (file := next((f for f in files if f.is_file()), None)) is not None:
        _make_known(file, other, name, str(file), groups)


def default_experiment(model: str | None) -> str:
    """Return the experiment of a command line without one: the demo for the demo's model, else `plain`."""
    return "signs" if model in (None, "signs") else "plain"


def experiments() -> list[str]:
    """Return the names of the shipped experiments."""
    return shipped("experiment")


def shipped(group: str) -> list[str]:
    """Return the names of the shipped yaml files of `group` (experiment, algorithm)."""
    return sorted(p.stem for p in (config_folder() / group).glob("*.yaml"))


def algorithm_of(preset: str) -> str:
    """Return the `algorithm.name` of a shipped `algorithm=PRESET`; empty if it is not shipped."""
    return str(preset_of(preset).name) if preset in shipped("algorithm") else ""


@functools.cache
def preset_of(preset: str) -> DictConfig:
    """Return the keys of the block `algorithm` that a shipped preset sets."""
    block = OmegaConf.load(config_folder() / "algorithm" / f"{preset}.yaml").algorithm
    assert isinstance(block, DictConfig)
    return block


def no_such(group: str, value: str) -> str:
    """Return the sentence for an unknown experiment or algorithm."""
    names = shipped(group)
    near = near_names(value, names)
    if group == "experiment" and Path(value + ".yaml").is_file():
        near = [f"{value}.yaml"]
    if other := other_value(group, value):
        return f"{group}={value}: there is no such {group}{other}; --help lists all"
    or_file = ", or give the path of your own .yaml file" if group == "experiment" else ""
    hint = f"did you mean {either(near)}; --help lists all" if near else f"choose one of {', '.join(names)}{or_file}"
    return f"{group}={value}: there is no such {group}; {hint}"


# --- Hydra's own options: `-m` and `--cfg job` of training, `--config-dir` of every command that takes an experiment

MULTIRUN = ("-m", "--multirun")
SHOW = ("-c", "--cfg")
FOLDER = ("-cd", "--config-dir")


@dataclass(frozen=True)
class HydraOptions:
    """The arguments without Hydra's options; `multirun`: a run per combination; `shown`: print the configuration."""

    arguments: list[str]
    multirun: bool = False
    shown: bool = False


def hydra_options(arguments: Sequence[str]) -> HydraOptions:
    """Separate Hydra's options from the arguments; `--config-dir` turns names of files in it into paths."""
    rest, values = list[str](), dict[tuple[str, str], str]()
    waiting = iter(arguments)
    for argument in waiting:
        name, equals, value = argument.partition("=")
        kind = next((kind for kind in (MULTIRUN, SHOW, FOLDER) if name in kind), None)
        if kind is None:
            rest.append(argument)
            continue
        if kind is MULTIRUN and equals:
            raise ConfigError(f"{argument}: {name} takes no value, write {name} alone, before or after the keys")
        value = name if kind is MULTIRUN else value if equals else next(waiting, "")
        if kind is not MULTIRUN and kind in values:
            raise ConfigError(f"{name} is given twice: keep one")
        if not value:
            raise ConfigError(f"{name} is empty: expected {name} {'job' if kind is SHOW else 'a folder'}")
        values[kind] = value
    multirun, shown, folder = (values.get(kind) for kind in (MULTIRUN, SHOW, FOLDER))
    if shown not in (None, "job"):
        raise ConfigError(f"--cfg {shown}: use job, the configuration of the run; Hydra's own is not shown")
    if shown and multirun:
        raise ConfigError(f"{multirun} and --cfg: a sweep has many configurations; keep one of them")
    if folder is not None:
        rest = _from_folder(rest, Path(folder).expanduser())
    return HydraOptions(rest, multirun is not None, shown is not None)


def without_options(arguments: Sequence[str]) -> list[str]:
    """Separate Hydra's options for commands that do not train; raises `ConfigError` for options of training."""
    options = hydra_options(arguments)
    if options.multirun or options.shown:
        name = next(argument for argument in arguments if argument.partition("=")[0] in MULTIRUN + SHOW)
        does = "trains with several values" if options.multirun else "prints a configuration"
        raise ConfigError(f"{name}: only gerl train {does}; remove it here")
    return options.arguments


def quoted(value: str) -> str:
    """Quote any text for Hydra's parser."""
    return QuotedString(value, Quote.single).with_quotes()


def spelled(value: object) -> str:
    """Write a plain value in Hydra's grammar."""
    if isinstance(value, Mapping):
        # keys are not quoted
        parts = {re.sub(r"([\\()\[\]{}:=, \t])", r"\\\1", str(key)): spelled(part) for key, part in value.items()}
        return "{" + ", ".join(f"{key}: {part}" for key, part in parts.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(spelled, value)) + "]"
    return quoted(value) if isinstance(value, str) else json.dumps(value)


def _from_folder(arguments: Sequence[str], folder: Path) -> list[str]:
    """Replace names in `experiment=NAME[,NAME ...]` or `algorithm=` by the paths of files in the folder."""
    if not folder.is_dir():
        raise ConfigError(f"--config-dir {folder}: there is no such folder; use the one with your experiments")
    parts = [argument.partition("=") for argument in arguments]
    return [
        f"{group}={','.join(_path(group, name, folder) for name in rest.split(','))}"
        if group in CHOICES
        else f"{group}{equals}{rest}"
        for group, equals, rest in parts
    ]


def _path(group: str, name: str, folder: Path) -> str:
    if not name or Path(name).is_file():  # a path stays a path
        return name
    places = [folder / "experiment", folder] if group == "experiment" else [folder / group]
    files = [place / f"{name}{suffix}" for place in places for suffix in ("", *SUFFIXES)]
    if file := next((file for file in files if file.suffix in SUFFIXES and file.is_file()), None):
        return str(file)
    if name.endswith(SUFFIXES) or name in shipped(group):
        return name
    there = sorted({file.stem for place in places for file in place.glob("*.y*ml")})
    near = near_names(name, [*there, *shipped(group)])
    hint = f"did you mean {either(near)}?" if near else f"it has {', '.join(there) or 'none'}"
    raise ConfigError(f"{group}={name}: there is no such file in --config-dir {folder}; {hint}")


# --- Arguments `key=value`: Hydra says what a value is, keys are looked up and set here, in nested dictionaries

# a source of prompts with a split, which looks like a list to Hydra
HUB_SOURCE = re.compile(r"""(?<!["'\w])hf:[^\s"'\[\]{},]+\[(?:[^"'\[\]]|\[[^"'\[\]]*\])+\]""")
PROMPTS = ("data.train", "validation.data")
TEXTS = ("data.template",)  # keys whose unquoted value is text, whatever Hydra would make of its braces and commas
TYPOGRAPHIC = re.compile("[\u2018-\u201f\u00ab\u00bb]")  # quotes
WHOLE = "reward.scorers"
REPLACED = (WHOLE, "trainer.stop_at")  # dictionaries that are replaced where they are given; others are merged


def key_of(argument: str) -> str:
    """Return the key of an argument without Hydra's `+` and `~`."""
    return argument.partition("=")[0].lstrip("+~")


def read(argument: str) -> Override:
    """Parse an argument; a value outside Hydra's grammar is text, or YAML if bracketed. Raises `ConfigError`."""
    name, equals, value = argument.partition("=")
    if key_of(argument) in PROMPTS:
        argument = HUB_SOURCE.sub(lambda source: f"'{source[0]}'", argument)
    is_text = key_of(argument) in TEXTS and value != "null" and not re.match(rf"['\"]|{TYPOGRAPHIC.pattern}|$", value)
    if is_text and (parsed := _parsed(f"{name}=0")) is not None:
        return replace(parsed, _value=value, input_line=argument)
    if (parsed := _parsed(argument)) is not None:
        return parsed
    # probably not meant as text
    is_slip = value[:1] in ("", "=", "'", '"') or value[-1] in "'\"" or bool(TYPOGRAPHIC.match(value))
    if equals and (parsed := _parsed(f"{name}=0")) is not None and not is_slip:
        with contextlib.suppress(yaml.YAMLError, RecursionError):
            closed = all(value.count(opening) == value.count(closing) for opening, closing in ("[]", "{}"))
            bracketed = value[0] in "[{" and (value[-1] in "]}" or not closed)  # `[a] b.txt` is text
            plain = load_yaml(value) if bracketed else value
            return replace(parsed, _value=plain, input_line=argument)
    raise ConfigError(_unreadable(argument))


def readable(argument: str) -> str:
    """Return the argument in a form that Hydra's parser accepts; raises as `read` does."""
    override = read(argument)
    line = override.input_line or argument
    is_hydras = _parsed(line) is not None and override.key_or_group not in TEXTS
    return line if is_hydras else f"{line.partition('=')[0]}={spelled(override.value())}"


_parser = functools.cache(OverridesParser.create)


def _parsed(argument: str) -> Override | None:
    try:
        return _parser().parse_override(argument)
    except (HydraException, ValueError, RecursionError):  # a cast such as int(x) of what is no number
        return None


def _unreadable(argument: str) -> str:
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


def _check_one_value(overrides: Sequence[Override]) -> None:  # of several, Hydra would take the last
    seen: dict[str, tuple[str, Override]] = {}
    for override in (override for override in overrides if not override.is_delete()):
        for key, value in _leaves(override.key_or_group, override.value()):
            before, first = seen.setdefault(key, (repr(value), override))
            if before != repr(value):
                raise ConfigError(f"{first.input_line} and {override.input_line} are both given: keep one")


def _texts(key: str, value: object) -> Iterator[tuple[str, str]]:
    """Yield the texts in a value by their keys."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping | list | tuple):
        parts = value.items() if isinstance(value, Mapping) else enumerate(value)
        for name, part in parts:
            yield from _texts(f"{key}.{name}", part)


def typed_texts(overrides: Sequence[str]) -> frozenset[str]:
    """Return the texts in the values of a command line: its user trusts the files that they name."""
    values = (read(o).value() for o in overrides if "=" in o and key_of(o) not in CHOICES)
    return frozenset(text for value in values for _, text in _texts("", value))


def is_of_run(experiment: str) -> bool:
    """Whether the file of `experiment=FILE` is the configuration of a run, which somebody else may have made."""
    target = os.path.realpath(os.path.expanduser(experiment)) if "\0" not in experiment else ""  # of a link
    return re.fullmatch(r"config(\.step_\d+)?\.ya?ml", os.path.basename(target)) is not None


def _leaves(key: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict) and value:
        for name, part in value.items():
            yield from _leaves(f"{key}.{name}", part)
    else:
        yield key, value


def set_keys(
    values: dict[str, Any], overrides: Sequence[Override], again: bool = False, removable: Sequence[str] = ()
) -> None:
    """Set, add and delete keys in nested `values`; raises `ConfigError`.

    `again`: they may exist or be missing. `removable`: keys that may be deleted although they are missing.
    """
    blocks = list(values)
    for override in overrides:
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
            _take_away(values, override, again or key in removable)
            continue
        place = _place(values, names, key)
        old = place.get(leaf)
        merged = isinstance(value, dict) and isinstance(old, dict) and (key not in REPLACED or override.is_add())
        if override.is_add() and old is not None and not merged and not again:
            raise ConfigError(f"+{key}: the key exists, set it without the plus sign")
        place[leaf] = _merged(old, value) if merged else value


def _place(values: dict[str, Any], names: Sequence[str], key: str) -> dict[str, Any]:
    """Return the dictionary that holds or will hold the last part of `key`."""
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
    """Apply `~KEY`: restore the default of a key, or delete an entry of a dictionary."""
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
    """Return the error for an unknown key."""
    return ConfigError(f"{key}: there is no such key{did_you_mean(key)}; {LISTED}")
