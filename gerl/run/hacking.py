"""One card for a run with signs of reward hacking: the step to use, images before and after, what fell, what to do."""

import contextlib
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from gerl.errors import GerlError
from gerl.run.choice import Choice, choice_of
from gerl.run.guard import LOOKS, WORDS, read_guard
from gerl.run.health import number
from gerl.run.settings import get
from gerl.run.validation import Validation, evenly, load_validation, mean, validation_steps

PAIRS, FALLS = 3, 8  # pairs of images, and lines, at most
# signals in the order of their weight: what fell, what images lost, how they drifted
GRAVITY = {"watched": 0, "disagreement": 0, "base/alignment": 0, "kl": 0, "base": 1, "diversity": 1}
WHOLE = 4.0  # standard deviations that count like the loss of a whole column
NO_SIGNALS = ("rollback", "advice")  # rows of guard.jsonl
FELL: Mapping[str, str] = WORDS["fell"]
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Pair:
    """Held-out image of the first validation and of a flagged one, `[H, W, 3]` uint8 each, from the same noise."""

    prompt: str
    before: np.ndarray
    after: np.ndarray


@dataclass(frozen=True)
class HackingCard:
    """What to know about a run with signals of the guard.

    lasts: whether its newest held-out images have signals. steps: of the images of a pair; empty without pairs. falls:
    a line per signal, the worst first. advice: what to do, with its command or keys, which may be empty.
    """

    title: str
    lasts: bool
    steps: Sequence[int]
    pairs: Sequence[Pair]
    falls: Sequence[str]
    advice: Sequence[tuple[str, str]]


def hacking_card(run_dir: Path, config: Mapping[str, Any]) -> HackingCard | None:
    """Read the card of a run; None without signals. config: as in config.yaml."""
    rows = read_guard(run_dir)
    folder, returned, signals = _signals(run_dir, rows)
    if not signals:
        return None
    flagged = sorted({row["step"] for row in signals})
    judged = sorted({*validation_steps(run_dir), *flagged})
    off = get(config, "guard", "action") == "off"  # nothing was compared since
    lasts = returned is None and (off or flagged[-1] == judged[-1])
    if returned is not None:
        what = f"Returned from step {flagged[-1]} to step {returned} for signs of reward hacking"
    elif lasts:
        calm = max((step for step in judged if step not in flagged), default=-1)
        what = f"Probably hacked since step {next((step for step in flagged if step > calm), flagged[-1])}"
    else:
        what = f"Signs of reward hacking at step {flagged[-1]}, none since"
    choice = choice_of(run_dir)
    use = "" if choice is None else f": use {_name_of(choice.use)}"
    changes = _changes(run_dir, folder, flagged[-1])
    now = sorted((row for row in signals if row["step"] == flagged[-1]), key=lambda row: _gravity(row, changes))
    steps, pairs = _pairs(run_dir, folder, [*now, *(row for row in reversed(signals) if row not in now)])
    falls = dict.fromkeys(_fall(row, changes) for row in now if not _is_said(row, now))
    advice = [*_taking(run_dir, choice), *_training(rows, now, config)]
    return HackingCard(f"{what}{use}", lasts, steps, pairs, list(falls)[:FALLS], advice)


def _signals(run_dir: Path, rows: Sequence[Row]) -> tuple[Path, int | None, Sequence[Row]]:
    """Return the signals of a run, and their folder; if there are none, those of its last rollback, and its step."""
    signals = [row for row in rows if row["signal"] not in NO_SIGNALS]
    rollbacks = [row for row in rows if row["signal"] == "rollback"]
    if signals or not rollbacks:
        return run_dir, None, signals
    step = rollbacks[-1]["step"]
    names = {path.name: path for path in (run_dir / "abandoned").glob(f"after_step_{step}*")}
    matches = (re.fullmatch(rf"after_step_{step}(?:_(\d+))?", name) for name in names)
    numbers = {int(match[1] or 1): names[match[0]] for match in matches if match}
    folder = numbers[max(numbers)] if numbers else run_dir
    later = [row for row in read_guard(folder) if row["signal"] not in NO_SIGNALS and row["step"] > step]
    return folder, step, later


def _load(folder: Path, step: int) -> Validation | None:
    with contextlib.suppress(GerlError):
        return load_validation(folder, step, pictures=False)
    return None


# --- What fell


def _changes(run_dir: Path, folder: Path, step: int) -> dict[str, tuple[float, float]]:
    """Return column -> its largest mean before a validation, and its mean in it."""
    later = _load(folder, step)
    earlier = [_load(run_dir, before) for before in validation_steps(run_dir) if before < step]
    if later is None:
        return {}
    changes = {}
    for name, values in later.by_scorer.items():
        levels = [mean(one.by_scorer.get(name, ())) for one in earlier if one is not None]
        earlier_levels, after = [level for level in levels if level is not None], mean(values)
        if earlier_levels and after is not None:
            changes[name] = max(earlier_levels), after
    return changes


def _gravity(row: Row, changes: Mapping[str, tuple[float, float]]) -> tuple[int, float]:
    """Return a sort key, the worst first: the weight of a signal, and its size as a share of what was there."""
    weight = _weight(row)
    if row["signal"] in ("watched", "disagreement") and row["column"] in changes:
        before, after = changes[row["column"]]
        return weight, -(before - after) / abs(before) if before else -1.0
    return weight, -min(1.0, abs(number(row, "value") or 0.0) / WHOLE)


def _weight(row: Row) -> int:
    return GRAVITY.get(f"{row['signal']}/{row['column']}", GRAVITY.get(row["signal"], 2))


def _is_said(row: Row, rows: Sequence[Row]) -> bool:
    """Whether the fall of a column is said by another line."""
    watched = (other for other in rows if other["signal"] == "watched")
    return row["signal"] == "disagreement" and any(other["column"] == row["column"] for other in watched)


def _fall(row: Row, changes: Mapping[str, tuple[float, float]]) -> str:
    """Say in plain words what a signal is about."""
    name, column = row["signal"], row["column"]
    words, value = FELL.get(f"{name}/{column}", FELL.get(name)), number(row, "value")
    if words is None or value is None or (name == "watched" and column not in changes):
        return str(row["text"])[:300]
    before, after = changes.get(column, (0.0, 0.0))
    share = (before - after) / abs(before) if before else 1.0
    way = "rose" if value > 0 else "fell"
    size, look = abs(value), LOOKS.get(column, column)
    return words.format(column=column, before=before, after=after, share=share, size=size, look=look, way=way)


# --- Images before and after


def _pairs(run_dir: Path, folder: Path, rows: Sequence[Row]) -> tuple[Sequence[int], list[Pair]]:
    """Return the steps of the first validation and the newest flagged one with images, and their pairs.

    Of different prompts, those that changed most: by signals of the most weight, the first of each in turn.
    """
    firsts = ((step, _images(run_dir, step)) for step in validation_steps(run_dir))
    first, before = next(((step, images) for step, images in firsts if images), (0, {}))
    for step in dict.fromkeys(row["step"] for row in rows if before and row["step"] > first):
        after = _images(folder, step)
        lists: dict[int, list[list[Any]]] = {}  # weight of a signal -> where it shows most, by signal
        for row in rows:
            if row["step"] == step and isinstance(row.get("shown"), list):
                lists.setdefault(_weight(row), []).append(row["shown"])
        turns = chain(*(chain(*zip_longest(*lists[weight])) for weight in sorted(lists)))
        order = [place for place in turns if type(place) is int]
        pairs = dict[str, Pair]()
        for place in [*order, *evenly(list(after), PAIRS)]:
            if place in before and place in after and before[place][0] == after[place][0]:
                pairs.setdefault(after[place][0], Pair(after[place][0], before[place][1], after[place][1]))
            if len(pairs) == PAIRS:
                break
        if pairs:
            return (first, step), list(pairs.values())
    return (), []


def _images(folder: Path, step: int) -> dict[int, tuple[str, np.ndarray]]:
    """Return the prompts and images of a validation or look, by their rows in the first validation."""
    for name in ("step", "look"):
        with contextlib.suppress(GerlError):
            validation = load_validation(folder, step, name=name)
            rows = (name == "look" and validation.ids) or range(len(validation.prompts))
            shown = zip(validation.shown, validation.pixels, strict=True)
            return {rows[place]: (validation.prompts[place], image) for place, image in shown}
    return {}


# --- What to do


def _name_of(use: int | None) -> str:
    return "the base model" if use is None else f"step {use}" if use else "step 0, before training"


def _taking(run_dir: Path, choice: Choice | None) -> Iterator[tuple[str, str]]:
    command = f"gerl export {shlex.quote(f'run={run_dir}')}"
    if choice is not None and choice.use is not None:
        yield f"Take step {choice.use}", f"{command} step={choice.use}"
    elif choice is not None:
        words = "Keep the base model, since every checkpoint has signals; or take the earliest"
        yield words, f"{command} step={choice.flagged[0]}"


def _training(rows: Sequence[Row], now: Sequence[Row], config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Return what to change in the next run, as keys with values where they are known."""
    weights = [number(row, "value") for row in rows if row["signal"] == "advice" and row["column"] == "kl_coef"]
    if weights and weights[-1] is not None:
        yield "Train again with a KL to the base model", f"algorithm.kl_coef={weights[-1]:g}"
    fallen = dict.fromkeys(row["column"] for row in now if row["signal"] in ("watched", "disagreement"))
    scorers = {name: get(config, "reward", "scorers", name) for name in fallen}
    watched = [name for name, scorer in scorers.items() if get(scorer or {}, "weight") == 0]
    keys = list[str]()
    for name in watched:
        keys.append(f"reward.scorers.{name}.weight=1")
        if get(scorers[name], "during") in ("training", "validation"):
            keys.append(f"reward.scorers.{name}.during=both")
    if keys:
        yield "Give what fell a weight in the reward", shlex.join(keys)
    elif not weights:
        others = "a KL to the base model (algorithm.kl_coef) or fewer steps"
        yield f"Train again with a scorer for what the images lost, {others}", ""
    ignored = dict.fromkeys(f"{row['signal']}/{row['column']}" for row in now)
    yield "If this change is meant, ignore it", shlex.quote(f"guard.ignored=[{', '.join(ignored)}]")
