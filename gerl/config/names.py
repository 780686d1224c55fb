"""The names of all keys, and of what is near to one: a slip of the pen, or what another program calls it."""

import dataclasses
import difflib
import re
from collections.abc import Mapping
from typing import Any

from gerl.config.algorithm import BY_NAME
from gerl.config.algorithm_keys import AlgorithmConfig
from gerl.config.blocks import ScorerConfig
from gerl.config.configuration import Config
from gerl.config.elsewhere import MEANING, absent, elsewhere
from gerl.config.noised_images import AWMConfig
from gerl.config.policy_gradients import FlowGRPOConfig
from gerl.config.translation import Answer, answer

LISTED = "gerl train --help all lists all keys"


def did_you_mean(name: str, algorithm: type[AlgorithmConfig] | None = None) -> str:
    """`, did you mean 'x'` for the key nearest to `name`; else why there is none, or what its block has.

    `algorithm`: the one that is to read it; None: any.
    """
    if reason := absent(name):
        return f": {reason}"
    if near := nearest_key(name, algorithm):
        return f", did you mean {' and '.join(map(repr, near.split()))}"
    block, scorer = _block(name)
    leaves = [known.rpartition(".")[2] for known, _ in keys(algorithm) if known.rpartition(".")[0] == block]
    return f"; {block.replace('NAME', scorer)} has {', '.join(leaves)}" if block and leaves else ""


def nearest_key(name: str, algorithm: type[AlgorithmConfig] | None = None) -> str | None:
    """The key nearest to `name`, itself if it is one, None if none is near; `algorithm` as in `did_you_mean`.

    Names of other programs have gerl's for the same: several of them, separated by a space, where it has more than one.
    """
    names = [known for known, _ in keys(algorithm)]
    block, scorer = _block(name)
    leaf = name.rpartition(".")[2].lower()
    leaves = [known.rpartition(".")[2] for known in names if block and known.rpartition(".")[0] == block]
    meant = elsewhere(name, names)
    if meant and meant.startswith("algorithm.") and not set(meant.split()) <= set(names):
        meant = None  # the chosen algorithm does not read it
    if leaves:  # only the last part is compared: the common beginning would make everything look near
        if leaf in leaves:
            return f"{block}.{leaf}".replace("NAME", scorer)
        near = difflib.get_close_matches(leaf, leaves, n=1)
        if meant and (not near or name.lower() in MEANING or meant.startswith(f"{block}.")):
            return meant
        return f"{block}.{near[0]}".replace("NAME", scorer) if near else None
    inside = [known for known in names if not block and known.rpartition(".")[2] == leaf]
    if meant and (not inside or name.lower() in MEANING):
        return meant
    if inside:
        return inside[0]
    candidates = {known: known for known in names}
    if not block:  # a block, or the last part of a key
        candidates = {known.rpartition(".")[2]: known for known in reversed(names)}
        candidates |= {known: known for known in {known.split(".")[0] for known in names}}
    near = difflib.get_close_matches(name.lower(), sorted(candidates), n=1)
    if near:
        return candidates[near[0]]
    return next((known for known in names if block and known.rpartition(".")[2] == leaf), None)


def is_foreign(name: str) -> bool:
    """Whether it is a key of another program that gerl knows an answer for."""
    own = re.sub(r"^reward\.scorers\.[^.]+\.", "reward.scorers.NAME.", name) in dict(keys())
    own = own or name.lower() in dict(keys())  # in capitals
    return not own and (other_name(name) is not None or absent(name) is not None)


def answered(given: Mapping[str, Any], own: Mapping[str, Any]) -> Answer:
    """Translate keys of other programs, which are given beside gerl's `own`."""
    found = answer(given, own, dict(keys()))
    chosen = str(own.get("algorithm", found.written.get("algorithm", "")))
    used = [BY_NAME[chosen]] if chosen in BY_NAME else [FlowGRPOConfig, AWMConfig]  # those of the defaults
    for key in [key for key in found.written if key.startswith("algorithm.")]:
        leaf = key.partition(".")[2]
        if not all(leaf in (f.name for f in dataclasses.fields(cls)) for cls in used):
            found.why[key] = f"read with algorithm={' or '.join(readers(leaf)[:4])}"
    return found


def other_name(name: str) -> str | None:
    """gerl's key for what other programs call `name`, as in `nearest_key`; None for one of gerl's own, and others."""
    names = [known for known, _ in keys()]
    return None if name in names else elsewhere(name, names)


def _block(name: str) -> tuple[str, str]:
    """The block of a key, and the name of the scorer for which it has NAME."""
    block = name.rpartition(".")[0].lower()
    scorer = re.fullmatch(r"reward\.scorers\.([^.]+)", block)
    return ("reward.scorers.NAME", name.split(".")[2]) if scorer else (block, "NAME")


def keys(algorithm: type[AlgorithmConfig] | None = None) -> list[tuple[str, dataclasses.Field[Any]]]:
    """Every key as `(block.name, field)`, in order; the keys of a scorer appear as `reward.scorers.NAME.*`.

    `algorithm`: only the keys that this one reads; None: those of all, each once.
    """
    rows: dict[str, dataclasses.Field[Any]] = {}
    for block in dataclasses.fields(Config):
        classes = [block.type] if block.name != "algorithm" else [algorithm] if algorithm else BY_NAME.values()
        for f in (f for cls in classes for f in dataclasses.fields(cls)):  # type: ignore[arg-type]
            rows.setdefault(f"{block.name}.{f.name}", f)
            if f.name == "scorers":
                rows |= {f"reward.scorers.NAME.{s.name}": s for s in dataclasses.fields(ScorerConfig)}
    return list(rows.items())


def readers(key: str) -> list[str]:
    """The names of the algorithms that read `algorithm.KEY`."""
    return [name for name, cls in BY_NAME.items() if key in (f.name for f in dataclasses.fields(cls))]
