"""Blocks of the configuration and their keys: a default, an explanation and a range each."""

import dataclasses
import math
from dataclasses import field
from functools import partial
from typing import Any

from pydantic import ConfigDict

from gerl.errors import ConfigError


def key(
    default: Any,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    often: bool = False,
) -> Any:
    """A configuration key: its default, its explanation (shown by `--help`) and its range (`above` is exclusive).

    `often`: see `main_key`.
    """
    metadata = {"help": help, "low": low, "high": high, "above": above, "often": often}
    if isinstance(default, dict | list):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


main_key = partial(key, often=True)  # one of the most used, which `--help` alone shows


class Block:
    """Checks the ranges given to `key`; blocks add what concerns several of their keys in `check`."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, f.name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            low, high, above = (f.metadata.get(bound) for bound in ("low", "high", "above"))
            if not math.isfinite(value):
                raise ConfigError(f"{self._path(f.name)}={value}: it must be a finite number")
            if low is not None and value < low:
                raise ConfigError(f"{self._path(f.name)}={value}: it must be at least {low}")
            if high is not None and value > high:
                raise ConfigError(f"{self._path(f.name)}={value}: it must be at most {high}")
            if above is not None and value <= above:
                raise ConfigError(f"{self._path(f.name)}={value}: it must be greater than {above}")
        self.check()

    def _path(self, name: str) -> str:
        block = type(self).__name__.removesuffix("Config").lower()
        return f"{'reward.scorers.NAME' if block == 'scorer' else block}.{name}"

    def check(self) -> None:
        """Raise `ConfigError` where keys of the block contradict each other."""
