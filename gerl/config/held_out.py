"""Held-out metrics that a key names: the one that makes a checkpoint the best, and the one that ends a run."""

import difflib
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from gerl.config.schema import shown
from gerl.errors import ConfigError

REWARD = "val/reward/mean"
OF_EVERY_COLUMN = ("mean", "gain", "gain_low", "gain_high")
METRIC = re.compile(r"val/(.+)/(\w+)")


def parts(metric: str) -> tuple[str, str]:
    """Return the column and the statistic of a held-out metric, such as `ocr/exact` and `mean`."""
    match = METRIC.fullmatch(metric)
    return (match[1], match[2]) if match else ("", "")


def check_form(key: str, metric: object) -> None:
    """Raise `ConfigError` unless `metric` looks like the name of a held-out metric; `key`: with its value."""
    if not isinstance(metric, str) or not METRIC.fullmatch(metric):
        raise ConfigError(f"{key}: expected a held-out metric, val/COLUMN/STATISTIC, such as {REWARD}")


@dataclass(frozen=True)
class Criterion:
    """What makes a checkpoint the best: a held-out metric, and whether lower values of it are better."""

    metric: str = REWARD
    lower: bool = False

    @classmethod
    def parse(cls, text: str) -> "Criterion":
        """Parse `checkpoint.best`: the metric, with a minus in front if lower is better. Raises `ConfigError`."""
        criterion = cls(text.removeprefix("-"), text.startswith("-"))
        check_form(f"checkpoint.best={shown(text)}", criterion.metric)
        return criterion

    def rank(self, value: float) -> float:
        """Return a number that is the higher the better."""
        return -value if self.lower else value


BY_REWARD = Criterion()


@dataclass(frozen=True)
class Goal:
    """A held-out metric and the value at which a run ends, `trainer.stop_at`."""

    metric: str
    limit: float
    above: bool

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> "Goal | None":
        """Parse `{metric: NAME, above: NUMBER}`, or `below`; None if it is empty. Raises `ConfigError`."""
        if not values:
            return None
        key = f"trainer.stop_at={shown(dict(values))}"
        limits = [side for side in ("above", "below") if side in values]
        if set(values) != {"metric", *limits} or len(limits) != 1:
            raise ConfigError(
                f"{key}: expected a metric and one limit, such as {{metric: val/ocr/success_rate, above: 0.95}} or "
                "{metric: val/lpips/mean, below: 0.2}"
            )
        limit = values[limits[0]]
        if isinstance(limit, bool) or not isinstance(limit, int | float) or not math.isfinite(limit):
            raise ConfigError(f"{key}: {limits[0]} must be a number")
        check_form(key, values["metric"])
        return cls(values["metric"], float(limit), limits[0] == "above")

    def reached(self, metrics: Mapping[str, float]) -> bool:
        """Whether the metric is at or beyond the limit."""
        value = metrics.get(self.metric, math.nan)
        return value >= self.limit if self.above else value <= self.limit

    def words(self, metrics: Mapping[str, float]) -> str:
        """Say that the metric has reached the limit."""
        side = "at least" if self.above else "at most"
        return f"{self.metric} is {metrics[self.metric]:.4g}, {side} {self.limit:g} (trainer.stop_at)"


def chosen(best: str, stop_at: Mapping[str, Any]) -> dict[str, str]:
    """Return the metrics of `checkpoint.best` and `trainer.stop_at` by the key with its value; without the default."""
    criterion, goal = Criterion.parse(best), Goal.parse(stop_at)
    metrics = {} if criterion == BY_REWARD else {f"checkpoint.best={best}": criterion.metric}
    return metrics | ({} if goal is None else {"trainer.stop_at": goal.metric})


def unknown(key: str, metric: str, known: Collection[str]) -> str:
    """Describe a `metric` that is none of the `known` ones; `key`: with its value."""
    near = difflib.get_close_matches(metric, known, n=1, cutoff=0.8)
    hint = f"did you mean {near[0]}? T" if near else "t"
    return (
        f"{key}: there is no held-out metric {metric}; {hint}here are {', '.join(known)}, and gain, gain_low and "
        "gain_high in place of mean"
    )
