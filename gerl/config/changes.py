"""Changes of the configuration when a run is resumed, and the keys that cannot change."""

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gerl.config.algorithms import settings_class
from gerl.config.configuration import Config
from gerl.config.suggestions import keys
from gerl.config.user_files import is_trusted

Settings = dict[str, Any]  # block -> key -> value

# keys that a resumed run and its checkpoint must share, with the reason
FIXED: dict[str, str] = yaml.safe_load(Path(__file__).with_name("fixed.yaml").read_text(encoding="utf-8"))
# keys of files that are compared by content, so that files may be renamed
CONTENT = ("data.train", "validation.data", "data.regularise", "algorithm.path")
# blocks whose removed keys did not affect the results of a run
HARMLESS = ("checkpoint", "cluster", "guard", "logger")


@dataclass(frozen=True)
class Change:
    """A key with its old and new value."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key} {shown(self.old)} -> {shown(self.new)}"


def settings_of(config: Config) -> Settings:
    """Return all settings of a run as in `config.yaml`, which excludes `checkpoint.resume`."""
    values = dataclasses.asdict(config)
    del values["checkpoint"]["resume"]
    return values


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """Return the keys of both settings whose values differ, and added or removed scorers."""
    before, after = flat_settings(old), flat_settings(new)
    changed = [Change(key, before[key], value) for key, value in after.items() if before.get(key, value) != value]
    scorers, others = scorers_of(old), scorers_of(new)
    changed += [Change(f"reward.scorers.{name}", None, value) for name, value in others.items() if name not in scorers]
    return changed + [Change(f"reward.scorers.{name}", v, None) for name, v in scorers.items() if name not in others]


def unknown_keys(settings: Mapping[str, Any]) -> list[str]:
    """Return the keys of a `config.yaml` that no longer exist; a block that is not a mapping counts as a key."""
    block = settings.get("algorithm")
    is_data = isinstance(block, Mapping) and not is_trusted(block.get("path"))  # its own keys are not known
    names = {key for key, _ in keys(None if is_data else settings_class(block))}
    values = flat_settings(settings)
    return [
        key
        for key in values
        if re.sub(r"^(reward\.scorers)\.[^.]+", r"\1.NAME", key) not in names
        and not (is_data and key.startswith("algorithm."))
    ]


def without(settings: Settings, names: Iterable[str]) -> Settings:
    """Return the settings without the keys `names`, of the form `block.key`."""
    gone = set(names)
    return {
        block: {key: value for key, value in values.items() if f"{block}.{key}" not in gone}
        for block, values in settings.items()
        if isinstance(values, Mapping)
    }


def flat_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values by key, named as in `--help all`; a block that is not a mapping is a value."""
    rows: dict[str, Any] = {}
    for block, values in settings.items():
        entries = values if isinstance(values, Mapping) else {"": values}
        plain = (item for item in entries.items() if item[0] not in ("scorers", "resume"))
        rows |= {f"{block}.{key}".rstrip("."): value for key, value in plain}
    for name, scorer in scorers_of(settings).items():
        rows |= {f"reward.scorers.{name}.{key}": value for key, value in scorer.items()}
    return rows


def scorers_of(settings: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the scorers in `settings` by name."""
    reward = settings.get("reward")
    scorers = reward.get("scorers") if isinstance(reward, Mapping) else None
    return {n: v for n, v in scorers.items() if isinstance(v, Mapping)} if isinstance(scorers, Mapping) else {}


def shown(value: Any) -> str:
    """Format a value as on the command line."""
    return value if isinstance(value, str) else json.dumps(value, default=str)
