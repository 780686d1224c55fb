"""The configurations of the roles of an episode, and checks across its turns, roles and scorers."""

import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, replace
from typing import Any

from gerl.config.configuration import Config
from gerl.config.episodes import OWN, EpisodeConfig
from gerl.config.reading import from_mapping
from gerl.config.schema import shown
from gerl.errors import ConfigError


def role_config(config: Config, name: str) -> Config:
    """Return the configuration of the role `name`: the run's own, with the keys of `episode.roles`.

    Raises `ConfigError` for keys that are not valid, named `episode.roles.NAME.KEY`.
    """
    keys = config.episode.roles.get(name)
    if keys is None:
        return config
    values = asdict(replace(config, episode=EpisodeConfig()))
    values["guard"] |= {"action": "off", "judge": "off"}
    for scorer in values["reward"]["scorers"].values():
        scorer |= {"turns": None, "roles": None}
    if config.episode.is_text(name):
        fresh = asdict(type(config)())
        values |= {"model": fresh["model"] | {"dtype": config.model.dtype}, "sampling": fresh["sampling"]}
        values["algorithm"] = {"name": "flow_grpo", "clip_low": 0.2, "clip_high": 0.2}  # of token ratios, as in PPO
        values["rollout"]["quantize"] = "none"
    if (images := config.episode.images_of(name)) is not None:
        values["rollout"]["n"] = images
    for key, value in keys.items():
        if key in OWN:
            continue
        block, _, rest = str(key).partition(".")
        if key == "algorithm.name" and config.episode.is_text(name):
            raise ConfigError(f"episode.roles.{name}.{key}: a role that rewrites prompts trains by GRPO; remove it")
        if key == "algorithm.name" and value != values["algorithm"]["name"]:
            others = {k.partition(".")[2]: v for k, v in keys.items() if str(k).startswith("algorithm.")}
            values["algorithm"] = deepcopy(others)
        elif rest:
            values[block] = {**values[block], rest: deepcopy(value)}
        elif isinstance(value, Mapping):
            values[block] = {**values[block], **deepcopy(dict(value))}
        else:
            raise ConfigError(f"episode.roles.{name}.{block}={shown(value)}: it is a block; write {block}.KEY: VALUE")
    try:
        return from_mapping(values)
    except ConfigError as error:
        raise ConfigError(f"episode.roles.{name}: {error}") from None


def check_roles(config: Config) -> None:
    """Raise `ConfigError` if the configuration of a role, or the scorers of a turn, are not valid."""
    _check_scorers(config)
    for name in config.episode.roles:
        settings = role_config(config, name)
        if config.episode.is_text(name):
            if config.episode.text_role(name).kept >= settings.rollout.n:
                raise ConfigError(
                    f"episode.roles.{name}.kept: of {settings.rollout.n} texts per prompt none is sampled"
                )
        elif (n := settings.algorithm.needs).tree or n.reward_gradient or n.teachers or n.imitation or n.values:
            raise ConfigError(
                f"episode.roles.{name}: {settings.algorithm.name} needs trees, teachers, a critic or the gradient of "
                "the reward, which roles do not have; use another algorithm.name"
            )


def _check_scorers(config: Config) -> None:
    turns, episode = config.episode.parsed, config.episode
    for name, scorer in config.reward.scorers.items():
        allowed: dict[str, list[Any]] = {"turns": list(range(len(turns))), "roles": episode.all_roles}
        for column, values in allowed.items():
            if unknown := [value for value in getattr(scorer, column) or () if value not in values]:
                there = ", ".join(map(str, values)) or "no turns"
                raise ConfigError(
                    f"reward.scorers.{name}.{column}: {unknown[0]} is not in episode.turns; it has {there}"
                )
    weighted = [scorer for scorer in config.reward.scorers.values() if scorer.weight]
    for number, turn in enumerate(turns):
        needs = not episode.is_text(turn.role) and (number == len(turns) - 1 or episode.returns != "last")
        if weighted and needs and not any(scorer.scores_turn(number, turn.role) for scorer in weighted):
            raise ConfigError(
                f"episode.turns: no scorer with a weight scores turn {number} ({turn.role}); add one, or use "
                "episode.next=each and episode.returns=last for the reward of the last turn"
            )
    if episode.returns != "turn" and any(scorer.normalise != "none" for scorer in weighted):
        raise ConfigError(f"episode.returns={episode.returns}: it adds rewards of turns; use normalise=none")


def signature(config: Config, role: str) -> str:
    """Return a text that is equal for roles whose base model is loaded in the same way."""
    model = role_config(config, role).model
    of_lora = ("lora", "merge_lora", "lora_rank", "lora_alpha", "lora_targets")
    return json.dumps({k: v for k, v in asdict(model).items() if k not in of_lora}, default=str)
