"""Total reward of an image from its scores, and scored images as table rows."""

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from gerl.config import RewardConfig, ScorerConfig
from gerl.config.blocks import RunPart
from gerl.errors import ConfigError, DataError, RewardError
from gerl.protocol import DATA_SOURCE, Prompt, ScorerFailure, Scores

# --- Total reward of an image: applicable scorers, rescaling, weighted sum

NO_NAME = re.compile(r"[^\w .:-]")
LARGEST = 3.4028234663852886e38  # maximum of float32, the dtype of rewards in training


def applies(scorer: ScorerConfig, prompt: Prompt) -> bool:
    """Whether `scorer` scores images of `prompt`, by its data source, turn and role; never images from files."""
    if prompt.dataset_images:
        return False
    if (turn := prompt.turn) is not None and not scorer.scores_turn(turn.number, turn.role):
        return False
    return scorer.data_sources is None or str(prompt.metadata.get(DATA_SOURCE)) in scorer.data_sources


def active_scorers(scorers: Mapping[str, ScorerConfig], part: RunPart) -> dict[str, ScorerConfig]:
    """Return the scorers that are active in `part` of a run (`reward.scorers.NAME.during`)."""
    return {name: scorer for name, scorer in scorers.items() if scorer.during in ("both", part)}


def with_all_active(config: RewardConfig) -> RewardConfig:
    """Return the reward with every scorer active for all images, as in `gerl.score`."""
    return replace(config, scorers={name: replace(scorer, during="both") for name, scorer in config.scorers.items()})


def metric_name(source: object) -> str:
    """Return the part of a metric's name for a `data_source`, without slashes and characters that trackers refuse."""
    return NO_NAME.sub("_", str(source))


def thresholds(config: RewardConfig) -> dict[str, float]:
    """Return the scores from which on an image counts as a success, by scorer (`reward.scorers.NAME.success`)."""
    return {name: scorer.success for name, scorer in config.scorers.items() if scorer.success is not None}


def rescaled(scorer: ScorerConfig, score: float) -> float:
    """Return `clip(scale * score + offset)`."""
    value = scorer.scale * score + scorer.offset
    low, high = scorer.clip or (-math.inf, math.inf)
    return min(max(value, low), high)


def total(
    scorers: Mapping[str, ScorerConfig], prompt: Prompt, scores: Mapping[str, float | ScorerFailure]
) -> float | ScorerFailure | None:
    """Return the weighted sum of the rescaled scores that apply to `prompt`; None if one of them failed.

    Also None if no scorer with a weight applies, as in validation without human feedback. Scorers of weight 0 are only
    logged: their failure changes nothing. A value beyond float32 is a failure.
    """
    parts: dict[str, float] = {}
    for name, scorer in scorers.items():
        if scorer.weight == 0 or not applies(scorer, prompt):
            continue
        score = scores[name]
        if isinstance(score, ScorerFailure):
            return None
        counted = rescaled(scorer, score)
        parts[name] = scorer.weight * counted
        if max(abs(counted), abs(parts[name])) > LARGEST:
            return _too_large(name, counted if abs(counted) > abs(parts[name]) else parts[name])
    if not parts:
        return None
    value = math.fsum(parts.values())
    return value if abs(value) <= LARGEST else _too_large(max(parts, key=lambda name: abs(parts[name])), value)


def _too_large(name: str, value: float) -> ScorerFailure:
    return ScorerFailure(
        name, f"its part of the total is {value:g}, above the float32 limit {LARGEST:.2g}: lower scale or weight"
    )


def describe_reward(scorers: Mapping[str, ScorerConfig]) -> str:
    """Describe scorers and weights in one line, such as `1 x ocr + 0.1 x bright; watched: sharpness`."""
    parts = [f"{scorer.weight:g} x {name}{_notes(scorer)}" for name, scorer in scorers.items() if scorer.weight]
    only = {"both": "", "training": " (in training)", "validation": " (in validation)"}
    watched = [f"{name}{only[scorer.during]}" for name, scorer in scorers.items() if not scorer.weight]
    return " + ".join(parts).replace("+ -", "- ") + (f"; watched: {', '.join(watched)}" if watched else "")


def _notes(scorer: ScorerConfig) -> str:
    notes = ["scaled"] if (scorer.scale, scorer.offset, scorer.clip) != (1, 0, None) else []
    notes += [f"normalised by {scorer.normalise}"] if scorer.normalise != "none" else []
    notes += [f"for {' and '.join(scorer.data_sources)}"] if scorer.data_sources else []
    return f" ({', '.join(notes)})" if notes else ""


def check_routes(scorers: Mapping[str, ScorerConfig], prompts: list[Prompt]) -> None:
    """Raise `DataError` for the first prompt to which no scorer with a weight applies."""
    weighted = [scorer for scorer in scorers.values() if scorer.weight]
    for prompt in prompts if weighted else []:  # without weights there is no total
        if not prompt.dataset_images and not any(applies(scorer, prompt) for scorer in weighted):
            sources = sorted({source for scorer in scorers.values() for source in scorer.data_sources or ()})
            raise DataError(
                f"prompt {prompt.id}: {prompt.text!r} has the {DATA_SOURCE} {prompt.metadata.get(DATA_SOURCE)!r}, "
                "for which there is no scorer with a weight; reward.scorers.NAME.data_sources have "
                f"{', '.join(sources)}"
            )


# --- Scored images as table rows: a column for the total and for each scorer, and the reason for missing values

TOTAL = "total"  # column of the sum over scorers


class Row(Protocol):
    """Image with a `label` for messages and a value per column, None if missing; `failure` is the reason."""

    @property
    def label(self) -> str: ...

    @property
    def values(self) -> Mapping[str, float | None]: ...

    @property
    def failure(self) -> str: ...


def score_row(scores: Scores, i: int) -> tuple[dict[str, float | None], str]:
    """Return the values by column of image `i` of a micro-batch, and why some are missing."""
    causes = dict.fromkeys(f"{failure.scorer}: {failure.reason}" for failure in scores.failures[i])
    return {TOTAL: scores.totals[i]} | {name: column[i] for name, column in scores.by_scorer.items()}, "; ".join(causes)


def distinct_columns(rows: Sequence[Row]) -> dict[str, str]:
    """Return labels by distinct column; columns equal in every row share a label, such as `total = ocr`."""
    labels: dict[tuple[float | None, ...], list[str]] = {}
    for name in dict.fromkeys(name for row in rows for name in row.values):
        labels.setdefault(tuple(row.values.get(name) for row in rows), []).append(name)
    return {names[0]: " = ".join(names) for names in labels.values()}


def check_columns(reward: RewardConfig, columns: Collection[str]) -> None:
    """Raise `ConfigError` for a scorer named like another column of scores.csv."""
    if taken := [name for name in reward.scorers if name in columns]:
        raise ConfigError(f"reward.scorers.{taken[0]}: this name is a column of scores.csv, choose another")


def stop_at_failure(rows: Iterable[Row]) -> None:
    """Raise `RewardError` for the first row without a total, for `reward.on_error=stop`."""
    for row in rows:
        if row.values[TOTAL] is None:
            raise RewardError(
                f"{row.label} has no score: {row.failure}; fix the scorer, or list such images with "
                "reward.on_error=drop_group"
            )


def check_any_scored(rows: Sequence[Row]) -> None:
    """Raise `RewardError` if no row has a total."""
    if all(row.values[TOTAL] is None for row in rows):
        raise RewardError(f"no image has all its scores; the first failure: {rows[0].failure}; fix the scorer")
