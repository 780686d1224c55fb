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
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gerl.config import Config, ScorerConfig, did_you_mean, from_mapping, keys
from gerl.errors import ConfigError

PACKAGE = Path(__file__).resolve().parents[1]


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

    `experiment` may also be the path of a yaml file of one's own.
    """
    defaults = dataclasses.asdict(Config())
    del defaults["reward"]["scorers"]["ocr"]  # an experiment names its scorers; ocr is the default only where none does
    ConfigStore.instance().store("gerl", defaults)
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(config_folder()), version_base="1.3"):
            composed = compose("config", [_own_experiment(o) for o in overrides], return_hydra_config=True)
            run_dir = Path(composed.hydra.run.dir)
            experiment = str(composed.hydra.runtime.choices.experiment)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(_sentence(error)) from None
    values = _values(composed)
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
    try:
        content = OmegaConf.load(path)
    except yaml.YAMLError as error:
        raise ConfigError(f"experiment={value}: it is no yaml file ({str(error).splitlines()[0]})") from None
    ConfigStore.instance().store(path.stem, content, group="experiment", package="_global_")
    return f"experiment={path.stem}"


def _sentence(error: Exception) -> str:
    """What Hydra has to say, in one sentence with a remedy."""
    text = str(error)
    if match := re.search(r"Could not override '([^']+)'", text):
        name = match[1].split("@")[0]
        return f"{name}: there is no such key{did_you_mean(name)}; --help lists all, '+{name}=...' adds to a dictionary"
    if match := re.search(r"Could not append to config. An item is already at '([^']+)'", text):
        return f"+{match[1]}: the key exists, set it without the plus sign"
    if match := re.search(r"Could not find '([^']+)'", text):
        names = ", ".join(sorted(p.stem for p in (config_folder() / "experiment").glob("*.yaml")))
        return f"{match[1].replace('/', '=')}: there is no such file; choose one of {names}, or give a path ending in .yaml"
    return " ".join(text.split())


def help_text(program: str) -> str:
    """Every key with type, default and explanation."""
    lines = [
        f"usage: {program} [experiment=NAME|FILE.yaml] [key=value ...]",
        "",
        "Fine-tune a diffusers pipeline with reinforcement learning. Without arguments: the signs demo.",
        "  experiment=NAME        one of " + ", ".join(sorted(p.stem for p in (config_folder() / "experiment").glob("*.yaml"))),
        "  hydra.run.dir=FOLDER   where the run writes (default: outputs/EXPERIMENT/TIME)",
        "",
        "The keys, with their defaults; an experiment changes some of them.",
    ]
    block = ""
    for name, f in keys():
        if name.split(".")[0] != block:
            block = name.split(".")[0]
            lines.append("")
        default = f.default if f.default is not dataclasses.MISSING else f.default_factory()  # type: ignore[misc]
        shown = {"None": "null", "True": "true", "False": "false"}.get(str(default), str(default))
        choices = getattr(f.type, "__args__", ()) if "Literal" in str(f.type) else ()
        suffix = f" ({'|'.join(map(str, choices))})" if choices else ""
        lines.append(f"  {name}={shown}{suffix}\n      {f.metadata['help']}")
    return "\n".join(lines) + "\n"
