"""Describe the configuration of a run: differences from the defaults, and the labels of its curves."""

import dataclasses
import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from gerl.commandline.composition import compose_run, quoted, shipped
from gerl.config import ScorerConfig
from gerl.config.algorithms import algorithm_config
from gerl.config.blocks import FULL
from gerl.config.bounded_text import load_yaml, read_text, unlinked
from gerl.config.registry import ALGORITHMS
from gerl.config.user_files import only_typed
from gerl.errors import ConfigError, GerlError
from gerl.run.card import CARD, read_sessions, redact, redacted
from gerl.utils.files import reason
from gerl.utils.pages import render

log = logging.getLogger(__name__)
Values = Mapping[str, Any]


def read_config(path: Path) -> tuple[str, dict[str, Any]]:
    """Read the text and values of a config.yaml; empty if it is missing, no values if it is not valid YAML."""
    try:
        text = read_text(unlinked(path), errors="replace")
    except FileNotFoundError:
        return "", {}
    except OSError as error:
        raise GerlError(f"{path} cannot be read: {reason(error)}") from None
    try:
        values = load_yaml(text)
    except yaml.YAMLError:
        log.warning("%s is not valid YAML: the report shows it unparsed", path)
        values = None
    return text, values if isinstance(values, dict) else {}


def shown_config(text: str, values: Values) -> str:
    """Return the text of a config.yaml with `values` without secrets, which need not be on the line of their key."""
    hidden = redacted(values)
    return redact(text if hidden == values else yaml.safe_dump(hidden, sort_keys=False, allow_unicode=True))


def get(config: Values, *names: str) -> Any:
    """Return a nested value, None if it is missing."""
    value: Any = config
    for name in names:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def planned_steps(run_dir: Path, config: Values) -> int | None:
    """Return the planned trainer steps of a run: those of `trainer.epochs` in its card, else `trainer.steps`."""
    sessions = read_sessions(run_dir / CARD)
    steps = sessions[-1].get("steps") if sessions else None
    return steps if isinstance(steps, int) else get(config, "trainer", "steps")


def learning_rate(config: Values) -> float | None:
    """Return the learning rate of the trained weights, None if unknown."""
    train, lr = get(config, "model", "train") or "lora", get(config, "actor", "lr")
    full_rate = get(config, "actor", "full_lr")
    return lr if train == "lora" else full_rate or (lr / FULL if isinstance(lr, int | float) else None)


def changes(config: Values) -> list[tuple[str, str, str]]:
    """Return (key, value, default) of the keys that differ from `experiment=plain` with the algorithm of `config`.

    An algorithm of the user is not imported: its preset has the defaults of the keys that they share. Empty if the
    algorithm is unknown. Secrets are hidden.
    """
    name = get(config, "algorithm", "name") or "flow_grpo"
    name = name if get(config, "algorithm", "path") is None else get(config, "preset") or "flow_grpo"
    preset = f"algorithm={name}" if name in shipped("algorithm") else f"algorithm.name={quoted(str(name))}"
    try:
        with only_typed(()):
            defaults = dataclasses.asdict(compose_run(["experiment=plain", preset]).config)
    except ConfigError as error:
        log.warning("the report shows no differences from the defaults: %s", error)
        return []
    scorer = dataclasses.asdict(ScorerConfig())
    defaults["reward"]["scorers"] = {each: scorer for each in get(config, "reward", "scorers") or {}}
    settings = {key: value for key, value in config.items() if key not in ("experiment", "preset")}
    usual, current = _flat(defaults), _flat(redacted(settings))
    changed = [
        (key, shown_setting(value), shown_setting(usual[key]) if key in usual else "-")
        for key, value in current.items()
        if key not in usual or value != usual[key]
    ]
    return changed + [
        (f"reward.scorers.{each}", "with its defaults", "-")
        for each in get(config, "reward", "scorers") or {}
        if each != "ocr" and not any(key.startswith(f"reward.scorers.{each}.") for key, *_ in changed)
    ]


def difference(config: Values, other: Values) -> list[tuple[str, str, str]]:
    """Return (key, value, value in `other`) of the keys that differ, without secrets; "-" marks a missing key."""
    ours, its = _flat(redacted(config)), _flat(redacted(other))
    keys = [key for key in {**ours, **its} if key not in ours or key not in its or ours[key] != its[key]]
    shown = [{key: shown_setting(value) for key, value in values.items()} for values in (ours, its)]
    return [(key, shown[0].get(key, "-"), shown[1].get(key, "-")) for key in keys]


def training_label(config: Values) -> str:
    """Name of the training curve; exploration noise is mentioned where there is some."""
    return "training, with exploration noise" if is_stochastic(config) else "training"


def scorers(config: Values) -> list[str]:
    """Return the names of the scorers, those with a weight first."""
    scorers_block = get(config, "reward", "scorers")
    names = list(scorers_block) if isinstance(scorers_block, Mapping) else []
    return sorted(map(str, names), key=lambda name: get(scorers_block, name, "weight") == 0)


def roles(config: Values) -> list[str]:
    """Return the role of each turn of an episode; [] without turns."""
    turns = get(config, "episode", "turns")
    return [str(get(turn, "role")) for turn in turns] if isinstance(turns, list) else []


def differentiates(config: Values) -> bool:
    """Whether the algorithm learns only from the gradient of the reward; False if unknown."""
    name = get(config, "algorithm", "name")
    needs = algorithm_config(name).needs if isinstance(name, str) and name in ALGORITHMS else None
    return needs is not None and needs.reward_gradient and not needs.ratio


def is_stochastic(config: Values) -> bool:
    """Whether training rollouts have stochastic timesteps."""
    kernel, level = get(config, "sampling", "kernel"), get(config, "sampling", "noise_level")
    return kernel not in (None, "ode") and bool(level)


def explanation(config: Values) -> str:
    """Explain the difference between the training and the held-out curve."""
    shown = {"known": bool(config), "get": partial(get, config), "stochastic": is_stochastic(config)}
    return " ".join(render("explanation.txt.j2", **shown).split())


def _flat(values: Values, prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        nested = isinstance(value, Mapping) and value and key != "kwargs"  # the kwargs of a scorer are one row
        flat |= _flat(value, f"{name}.") if nested else {name: list(value) if isinstance(value, tuple) else value}
    return flat


def shown_setting(value: Any) -> str:
    """Format a value of a configuration as in YAML."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
