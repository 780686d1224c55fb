"""From the command line to a typed configuration, by Hydra."""

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gerl.config import Config, ScorerConfig, did_you_mean, from_mapping
from gerl.errors import ConfigError

PACKAGE = Path(__file__).resolve().parents[1]
# their entries are set without Hydra's plus sign: dictionaries, and the block whose keys its algorithm decides
FREE = ("sampling.call", "reward.scorers", "algorithm")


@dataclass(frozen=True)
class Composed:
    """A run as the command line asked for it."""

    config: Config
    experiment: str
    run_dir: Path

    def yaml(self) -> str:
        """The whole configuration, for `config.yaml` of the run folder."""
        values = {"experiment": self.experiment, **dataclasses.asdict(self.config)}
        return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def config_folder() -> Path:
    """The folder of the shipped yaml files: inside an installed package, beside it in a checkout."""
    installed = PACKAGE / "configs"
    return installed if installed.is_dir() else PACKAGE.parent / "configs"


def compose_run(overrides: Sequence[str]) -> Composed:
    """Compose defaults, experiment and `overrides` (`experiment=NAME`, `key=value`); raises `ConfigError`.

    `experiment` may also be the path of a yaml file of your own.
    """
    defaults = dataclasses.asdict(Config())
    defaults["algorithm"] = {}  # an algorithm's own defaults are those of its class
    del defaults["reward"]["scorers"]["ocr"]  # an experiment names its scorers; ocr is the default only where none does
    schema = OmegaConf.create(defaults)
    for free in FREE:
        OmegaConf.set_struct(OmegaConf.select(schema, free), False)
    ConfigStore.instance().store("gerl", schema)
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(config_folder()), version_base="1.3"):
            composed = compose("config", [_own_experiment(o) for o in overrides], return_hydra_config=True)
            run_dir = Path(composed.hydra.run.dir)
            experiment = str(composed.hydra.runtime.choices.experiment)
            _check_algorithm(overrides, str(composed.algorithm.name))
        values = _values(composed)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(_sentence(error)) from None
    if not values["reward"]["scorers"]:
        values["reward"]["scorers"] = {"ocr": dataclasses.asdict(ScorerConfig())}
    return Composed(from_mapping(values), experiment, run_dir)


def _values(composed: DictConfig) -> dict[str, Any]:
    own = OmegaConf.masked_copy(composed, [str(name) for name in composed if name != "hydra"])
    plain = OmegaConf.to_container(own, resolve=True, throw_on_missing=True)
    assert isinstance(plain, dict)
    return {str(name): value for name, value in plain.items()}


def _own_experiment(override: str) -> str:
    """`experiment=path/to/mine.yaml` as an override by name, after making the file known to Hydra."""
    name, _, value = override.partition("=")
    if name != "experiment" or not value.endswith((".yaml", ".yml")):
        return override
    path = Path(value).expanduser()
    if not path.is_file():
        raise ConfigError(f"experiment={value}: there is no such file")
    stem = re.sub(r"[^\w.-]", "_", path.stem)  # a name that Hydra takes without quotes, and a fit folder name
    if stem in experiments():
        raise ConfigError(f"experiment={value}: gerl has an experiment of the name {stem}, give the file another")
    try:
        content = OmegaConf.load(path)
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"experiment={value}: it is no yaml file ({str(error).splitlines()[0]})") from None
    if not isinstance(content, DictConfig):
        raise ConfigError(f"experiment={value}: expected blocks of keys, such as 'trainer: {{steps: 5}}', got a list")
    content.pop("experiment", None)  # in the config.yaml of a run it names what the run was composed from
    ConfigStore.instance().store(stem, content, group="experiment", package="_global_")
    return f"experiment={stem}"


def experiments() -> list[str]:
    """The names of the shipped experiments."""
    return shipped("experiment")


def shipped(group: str) -> list[str]:
    """The names of the shipped yaml files of `group` (experiment, algorithm)."""
    return sorted(p.stem for p in (config_folder() / group).glob("*.yaml"))


def _check_algorithm(overrides: Sequence[str], name: str) -> None:
    """`algorithm=NAME` must not be overruled by an experiment that sets `algorithm.name` (a run's config.yaml does)."""
    for override in overrides:
        key, _, value = override.partition("=")
        if key == "algorithm" and value in shipped("algorithm"):
            chosen = OmegaConf.load(config_folder() / "algorithm" / f"{value}.yaml").algorithm.name
            if chosen != name:
                raise ConfigError(
                    f"algorithm={value}: the experiment sets algorithm.name={name}, which wins: remove it there"
                )


def _sentence(error: Exception) -> str:
    """An error of Hydra in one sentence with a remedy."""
    text = str(error)
    if isinstance(error, OverrideParseException):
        hint = "quote a value with special characters, as in \"key='a b'\"; --help all lists the keys"
        return f"{error.override}: expected key=value; {hint}"
    if match := re.search(r"Ambiguous value for argument '([^']+)'", text):
        return f"{match[1]}: expected one value; write a list as [1,2] and quote a text with a comma, as in \"'a, b'\""
    if match := re.search(r"Could not override '([^']+)'", text):
        name = match[1].split("@")[0]
        return f"{name}: there is no such key{did_you_mean(name)}; --help all lists all"
    if match := re.search(r"Could not append to config. An item is already at '([^']+)'", text):
        return f"+{match[1]}: the key exists, set it without the plus sign"
    if match := re.search(r"Could not find '([^']+)'", text):
        names = ", ".join(shipped(match[1].split("/")[0]))
        return f"{match[1].replace('/', '=')}: there is no such file; choose one of {names}, or a path ending in .yaml"
    return " ".join(text.split())
