"""Recorded facts of the shipped recipes, so that sizing one of them needs no computation."""

import json
from dataclasses import asdict
from importlib import resources
from typing import Any

from gerl.commandline.composition import compose_run
from gerl.commandline.experiments import shipped
from gerl.config import Config
from gerl.data.sources import may_have_pictures
from gerl.preflight.sizing.facts import Facts

FOLDER = "sizing"  # of gerl/assets; benchmarks/sizing.py writes it
# keys that change no facts: layouts are computed from them, or they are read outside a rollout and an update
LAYOUT = ("quantize", "quantize_encoders", "shard", "offload")
OTHERS = ("cluster", "data", "trainer", "validation", "logger", "checkpoint", "reward")


def recorded(config: Config) -> tuple[str, Facts] | None:
    """The recipe whose facts are those of `config`, and these facts; None if no recipe has them."""
    wanted = _relevant(config)
    for name in shipped("experiment"):
        file = resources.files("gerl") / "assets" / FOLDER / f"{name}.json"
        if file.is_file() and (recipe := compose_run([f"experiment={name}"]).config).model.path == config.model.path:
            found = json.loads(file.read_text(encoding="utf-8"))
            if "refused" not in found and _relevant(recipe) == wanted:
                return name, Facts.from_json(found)
    return None


def _relevant(config: Config) -> dict[str, Any]:
    """The values that the facts depend on; of the data, whether prompts may come with pictures."""
    values = {block: keys for block, keys in asdict(config).items() if block not in OTHERS}
    values["model"] = {key: value for key, value in values["model"].items() if key not in LAYOUT}
    values["rollout"] = {k: v for k, v in values["rollout"].items() if k not in ("n", "prompts_per_step")}
    return values | {"pictures": may_have_pictures(config.data)}
