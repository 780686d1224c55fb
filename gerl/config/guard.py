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
        "response when held-out images indicate reward hacking or collapse (docs/guard.md): warn logs it; kl also "
        "raises the weight of the KL; rollback returns to the best earlier checkpoint and continues with that "
        "weight raised; stop ends the run with a checkpoint; off: no comparison",
    )
    ignored: list[str] = key(
        [],
        "signals to ignore: watched, disagreement, looks, diversity, kl, no_signal, or a single column, such as "
        "looks/red",
    )
    importance: float = key(
        0.0,
        "watched and disagreement: drops of a scorer by less than this times its standard deviation over the "
        "held-out prompts of the first validation are no signal, however significant; 0: every significant drop is "
        "a signal",
        low=0,
    )
    kl_start: float = key(
        0.01, "kl and rollback: the weight of the KL after the first signals, if algorithm.kl_coef is lower", above=0
    )
    kl_factor: float = key(2.0, "kl and rollback: factor for the weight of the KL at later signals", above=1)
    kl_most: float = key(1.0, "kl and rollback: upper limit of the weight of the KL", above=0)
    rollbacks: int = key(3, "maximum number of rollbacks; signals after that end the run", low=1)

    def check(self) -> None:
        for name in self.ignored:
            if name.partition("/")[0] not in SIGNALS:
                raise ConfigError(
                    f"guard.ignored: there is no signal {name!r}, only {', '.join(SIGNALS)}, and their columns, "
                    "such as looks/red"
                )
        if self.kl_start > self.kl_most:
            raise ConfigError(
                f"guard.kl_start={self.kl_start}: it exceeds the limit guard.kl_most={self.kl_most}; raise that, "
                "or lower this"
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
