"""Suggestions for unknown keys: similar names, and translations from other programs."""

import dataclasses
import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gerl.config import other_programs as others
from gerl.config.algorithms import AlgorithmConfig
from gerl.config.blocks import ScorerConfig
from gerl.config.configuration import Config
from gerl.config.other_programs import ForeignKeys, Why, absent, elsewhere, known_as, plain
from gerl.config.registry import ALGORITHMS
from gerl.config.schema import resolved_fields, shown, unfit

OPEN = "VALUE"  # placeholder for an unknown value
CHOSEN = ("algorithm", "experiment", "hydra.run.dir")


@dataclass
class Answer:
    """Translation of other programs' keys: gerl's keys with values (`VALUE` if unknown), and reasons."""

    written: dict[str, Any] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)  # by the other program's key, or gerl's
    idle: list[str] = field(default_factory=list)  # keys that need no translation


def answered(values: Mapping[str, Any], ours: Mapping[str, Any]) -> Answer:
    """Translate other programs' keys, given next to gerl's, `ours`, and note algorithm keys that are not read."""
    answer, everything = Answer(), ForeignKeys(values)
    sources: dict[str, str] = {}
    for name, value in values.items():
        if reason := absent(name):
            answer.why[name] = reason
            continue
        lines = _lines(name, value, everything, answer)
        if not lines and name not in answer.why:
            answer.idle.append(name)
        for key, meant in lines.items():
            before = answer.written.get(key, ours.get(key, meant))
            if key in ours and plain(ours[key]) != plain(meant):
                answer.why[name] = f"{key}={_text(ours[key])} is already given"
            elif plain(before) != plain(meant) and OPEN not in (before, meant):
                answer.written[key] = OPEN
                answer.why[key] = f"{sources[key]} and {name} mean the same; choose one value"
            elif before == OPEN or key not in answer.written:
                answer.written[key] = meant
                sources[key] = name
    chosen = str(ours.get("algorithm", answer.written.get("algorithm", "")))
    used = [chosen] if chosen in ALGORITHMS else ["flow_grpo", "awm"]  # the default algorithms
    for key in [key for key in answer.written if key.startswith("algorithm.")]:
        able = readers(key.partition(".")[2])
        if not set(used) <= set(able):
            answer.why[key] = f"read with algorithm={' or '.join(able[:4])}"
    return answer


def _lines(name: str, value: Any, foreign: ForeignKeys, answer: Answer) -> dict[str, Any]:
    """Return gerl's keys and values for one key, and note the reasons for unknown values in `answer`."""
    end, fields = known_as(name) or "", dict(keys())
    result: Any = others.RULES[end](value, foreign) if end in others.RULES else None
    result = others.FLAGS.get(end, {}).get(str(value).lower()) if result is None else result
    result = others.HINTS.get(end) if result is None else result
    if isinstance(result, str):
        return dict(line.split("=", 1) for line in re.split(r" (?=[a-z_.]+=)", result) if line)
    if isinstance(result, Why):
        return _open(name, value, result, answer)
    lines = result if isinstance(result, dict) else {key: value for key in (elsewhere(name, fields) or "").split()}
    translated: dict[str, Any] = {}
    for key, meant in lines.items():
        other = others.VALUES.get(key, {}).get(str(meant).lower()) if isinstance(meant, str | bool | None) else None
        if isinstance(other, Why):
            translated |= _open(name, meant, Why(other.text, other.key or key), answer)
            continue
        f = fields.get(re.sub(r"^reward\.scorers\.\w+\.", "reward.scorers.NAME.", key))
        meant = meant if other is None else other
        reason = _unfit(key, meant, f)
        if reason and isinstance(meant, str) and not _unfit(key, meant.lower(), f):
            meant, reason = meant.lower(), ""  # other programs may use capitals
        if reason:
            translated |= _open(name, meant, Why(f"{OPEN} must be {reason}, but {name} is {_text(meant)}", key), answer)
        else:
            translated[key] = meant
    return translated


def _open(name: str, value: Any, why: Why, answer: Answer) -> dict[str, Any]:
    answer.why[name] = why.text.replace("{}", _text(value))
    return {why.key: OPEN} if why.key else {}


def _unfit(key: str, value: Any, f: "dataclasses.Field[Any] | None") -> str:
    """Describe the values that `key` accepts; empty if `value` is accepted."""
    if key in CHOSEN:
        return "" if isinstance(value, str) and value.strip() else "a name"
    return "" if f is None else unfit(plain(value), f, spelled=True)


def other_value(key: str, value: object) -> str:
    """Return `; 'x' is 'y' here` for another program's value, or why there is no equivalent; empty if unknown."""
    if not isinstance(value, str | bool | None):
        return ""
    other = others.VALUES.get(key, {}).get("null" if value is None else str(value).lower())
    if isinstance(other, Why):
        return f"; {other.text}"
    return f"; {shown(value)} is {other} here" if other else ""


def _text(value: Any) -> str:
    return value if isinstance(value, str) else shown(value)


# --- Names of all keys, and the nearest key for a typo or another program's name

LISTED = "gerl train --help all lists all keys"


def did_you_mean(name: str, algorithm: type[AlgorithmConfig] | None = None) -> str:
    """Return `, did you mean 'x'`, a reason, or the keys of the block; `algorithm`: consider only the keys it reads."""
    if reason := absent(name):
        return f": {reason}"
    if near := nearest_key(name, algorithm):
        return f", did you mean {' and '.join(map(repr, near.split()))}"
    block, scorer = _block(name)
    leaves = [key.rpartition(".")[2] for key, _ in keys(algorithm) if key.rpartition(".")[0] == block]
    return f"; {block.replace('NAME', scorer)} has {', '.join(leaves)}" if block and leaves else ""


def nearest_key(name: str, algorithm: type[AlgorithmConfig] | None = None) -> str | None:
    """Return the key nearest to `name`: itself, or gerl's for another program's (several with spaces); None if none."""
    names = [key for key, _ in keys(algorithm)]
    block, scorer = _block(name)
    leaf = name.rpartition(".")[2].lower()
    leaves = [key.rpartition(".")[2] for key in names if block and key.rpartition(".")[0] == block]
    meant = elsewhere(name, names)
    if meant and meant.startswith("algorithm.") and not set(meant.split()) <= set(names):
        meant = None  # the selected algorithm does not read it
    if leaves:  # compare only the last part; with the common prefix all keys would seem near
        if leaf in leaves:
            return f"{block}.{leaf}".replace("NAME", scorer)
        near = difflib.get_close_matches(leaf, leaves, n=1)
        if meant and (not near or name.lower() in others.MEANING or meant.startswith(f"{block}.")):
            return meant
        return f"{block}.{near[0]}".replace("NAME", scorer) if near else None
    inside = [key for key in names if not block and key.rpartition(".")[2] == leaf]
    if meant and (not inside or name.lower() in others.MEANING):
        return meant
    if inside:
        return inside[0]
    candidates = {key: key for key in names}
    if not block:  # a block, or the last part of a key
        candidates = {key.rpartition(".")[2]: key for key in reversed(names)}
        candidates |= {key: key for key in {key.split(".")[0] for key in names}}
    near = difflib.get_close_matches(name.lower(), sorted(candidates), n=1)
    if near:
        return candidates[near[0]]
    return next((key for key in names if block and key.rpartition(".")[2] == leaf), None)


def is_foreign(name: str) -> bool:
    """Whether `name` is another program's key with a known translation or reason."""
    is_ours = re.sub(r"^reward\.scorers\.[^.]+\.", "reward.scorers.NAME.", name) in dict(keys())
    is_ours = is_ours or name.lower() in dict(keys())  # written in capitals
    return not is_ours and (other_name(name) is not None or absent(name) is not None)


def other_name(name: str) -> str | None:
    """Return gerl's key for another program's `name`; None for a key of gerl or an unknown name."""
    names = [key for key, _ in keys()]
    return None if name in names else elsewhere(name, names)


def _block(name: str) -> tuple[str, str]:
    block = name.rpartition(".")[0].lower()
    scorer = re.fullmatch(r"reward\.scorers\.([^.]+)", block)
    return ("reward.scorers.NAME", name.split(".")[2]) if scorer else (block, "NAME")


def keys(algorithm: type[AlgorithmConfig] | None = None) -> list[tuple[str, dataclasses.Field[Any]]]:
    """Return all keys as `(block.name, field)`, with `reward.scorers.NAME.*`; of `algorithm`: only those it reads."""
    rows: dict[str, dataclasses.Field[Any]] = {}
    for block in dataclasses.fields(Config):
        chosen = [algorithm] if algorithm else [cls.config_class for cls in ALGORITHMS.values()]
        for f in (f for cls in (chosen if block.name == "algorithm" else [block.type]) for f in resolved_fields(cls)):
            rows.setdefault(f"{block.name}.{f.name}", f)
            if f.name == "scorers":
                rows |= {f"reward.scorers.NAME.{s.name}": s for s in resolved_fields(ScorerConfig)}
    return list(rows.items())


def readers(key: str) -> list[str]:
    """Return the names of the algorithms that read `algorithm.KEY`."""
    return [name for name, cls in ALGORITHMS.items() if any(f.name == key for f in resolved_fields(cls.config_class))]
