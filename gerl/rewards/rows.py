"""Scored images as rows of a table: a column for the total and for each scorer, and why a value is missing."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

from gerl.config import RewardConfig
from gerl.errors import ConfigError, RewardError
from gerl.protocol import Scores

TOTAL = "total"  # the column that scorers are summed up in


class Row(Protocol):
    """An image, `label` in messages, with its value in each column, None where there is none: `failure` says why."""

    @property
    def label(self) -> str: ...

    @property
    def values(self) -> Mapping[str, float | None]: ...

    @property
    def failure(self) -> str: ...


def row_of(scores: Scores, i: int) -> tuple[dict[str, float | None], str]:
    """Values by column, and why some are missing, of image `i` of a micro-batch."""
    causes = dict.fromkeys(f"{failure.scorer}: {failure.reason}" for failure in scores.failures[i])
    return {TOTAL: scores.totals[i]} | {name: column[i] for name, column in scores.by_scorer.items()}, "; ".join(causes)


def distinct_columns(rows: Sequence[Row]) -> dict[str, str]:
    """The columns without those that repeat another one in every row, each with its label, such as `total = ocr`.

    With a single scorer the total is its score, and a table would say everything twice.
    """
    labels: dict[tuple[float | None, ...], list[str]] = {}
    for name in dict.fromkeys(name for row in rows for name in row.values):
        labels.setdefault(tuple(row.values.get(name) for row in rows), []).append(name)
    return {names[0]: " = ".join(names) for names in labels.values()}


def check_columns(reward: RewardConfig, columns: Collection[str]) -> None:
    """Raise `ConfigError` for a scorer whose name is that of another column of scores.csv."""
    if taken := [name for name in reward.scorers if name in columns]:
        raise ConfigError(f"reward.scorers.{taken[0]}: this name is a column of scores.csv, choose another")


def stop_at_failure(rows: Iterable[Row]) -> None:
    """Raise `RewardError` for the first row without a total, as `reward.on_error=stop` asks for."""
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
