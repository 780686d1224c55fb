"""The guard block: how a run reacts to signs of reward hacking."""

from dataclasses import dataclass
from typing import Literal

from gerl.config.schema import Block, key
from gerl.errors import ConfigError

SIGNALS = ("watched", "disagreement", "looks", "diversity")


@dataclass(frozen=True)
class GuardConfig(Block):
    action: Literal["off", "warn", "stop", "rollback"] = key(
        "warn",
        "what follows where held-out images speak for reward hacking or collapse (docs/guard.md): warn says it; stop "
        "also ends the run with a checkpoint; rollback ends it too, and what is exported is the best checkpoint from "
        "before; off: nothing is compared",
    )
    ignored: list[str] = key(
        [], "signals that do not count: watched, disagreement, looks, diversity, or one column of one, as in looks/red"
    )

    def check(self) -> None:
        for name in self.ignored:
            if name.partition("/")[0] not in SIGNALS:
                raise ConfigError(
                    f"guard.ignored: there is no signal {name!r}, only {', '.join(SIGNALS)}, and their columns, as in "
                    "looks/red"
                )

    def counts(self, signal: str, column: str) -> bool:
        """Whether the signal is not ignored."""
        return not {signal, f"{signal}/{column}"} & set(self.ignored)
