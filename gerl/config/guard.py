"""The guard block: how a run reacts to signs of reward hacking."""

from dataclasses import dataclass
from typing import Literal

from gerl.config.schema import Block, key
from gerl.errors import ConfigError

SIGNALS = ("watched", "disagreement", "looks", "diversity", "kl", "no_signal")


@dataclass(frozen=True)
class GuardConfig(Block):
    action: Literal["off", "warn", "kl", "rollback", "stop"] = key(
        "warn",
        "what follows where held-out images speak for reward hacking or collapse (docs/guard.md): warn says it; kl "
        "also raises the weight of the KL; rollback goes back to the best checkpoint from before and on from there "
        "with that weight raised; stop ends the run with a checkpoint; off: nothing is compared",
    )
    ignored: list[str] = key(
        [],
        "signals that do not count: watched, disagreement, looks, diversity, kl, no_signal, or one column of one, as "
        "in looks/red",
    )
    importance: float = key(
        0.0,
        "watched and disagreement: falls of a scorer by less than this times its standard deviation over the held-out "
        "prompts of the first validation are no signal, however sure they are; 0: what is sure is a signal",
        low=0,
    )
    kl_start: float = key(
        0.01, "kl and rollback: the weight of the KL after the first signals, if algorithm.kl_coef is less", above=0
    )
    kl_factor: float = key(2.0, "kl and rollback: factor of the weight of the KL at signals after that", above=1)
    kl_most: float = key(1.0, "kl and rollback: the weight of the KL is not raised above this", above=0)
    rollbacks: int = key(3, "times that a run goes back; signals after that end it", low=1)

    def check(self) -> None:
        for name in self.ignored:
            if name.partition("/")[0] not in SIGNALS:
                raise ConfigError(
                    f"guard.ignored: there is no signal {name!r}, only {', '.join(SIGNALS)}, and their columns, as in "
                    "looks/red"
                )
        if self.kl_start > self.kl_most:
            raise ConfigError(
                f"guard.kl_start={self.kl_start}: it is above guard.kl_most={self.kl_most}, the largest weight; raise "
                "that, or lower this"
            )

    @property
    def raises_kl(self) -> bool:
        """Whether signals raise the weight of the KL."""
        return self.action in ("kl", "rollback")

    def raised(self, coef: float) -> float:
        """The weight of the KL after signals, where it was `coef`."""
        if coef < self.kl_start:
            return self.kl_start
        return max(coef, min(self.kl_most, coef * self.kl_factor))

    def counts(self, signal: str, column: str) -> bool:
        """Whether the signal is not ignored."""
        return not {signal, f"{signal}/{column}"} & set(self.ignored)
