"""Exceptions of gerl: each message is one sentence with what was expected, what was found and what to do."""

import signal
from collections.abc import Iterator
from typing import Any


class GerlError(Exception):
    """Base class: a message the user can act on; the command line shows it without a traceback."""


class ConfigError(GerlError):
    """A configuration key has a value that cannot work."""


class TrustError(ConfigError):
    """The settings of a run name code, which runs only if the user trusts it."""


class DataError(GerlError):
    """A prompt file is missing, empty or has a row that cannot be used."""


class ModelError(GerlError):
    """A pipeline cannot be loaded, or cannot be trained."""


class ReplayError(GerlError):
    """A replay did not do what the rollout did, so its log-probabilities would be wrong."""


class RewardError(GerlError):
    """A scorer is not available, or failed and `reward.on_error` is `stop`."""


class CheckpointError(GerlError):
    """A checkpoint cannot be written or read, or belongs to another run."""


class FlaggedError(CheckpointError):
    """Every validated checkpoint of a run has signals of the guard: none is used without being named."""


class ClusterError(GerlError):
    """The workers cannot be placed or one of them died."""


class RayDied(ClusterError):
    """Ray itself is gone, without which no worker can be replaced."""


class WorkerDied(ClusterError):
    """The process of a worker ended while it was needed."""


class TrainingError(GerlError):
    """The update became meaningless: non-finite gradients, or a ratio that is not 1 on policy."""


class GuardError(GerlError):
    """Held-out images speak for reward hacking or collapse, and `guard.action` is to end the run."""


class VersionError(GerlError):
    """A feature needs a newer version of a package than the installed one."""


class Interrupted(KeyboardInterrupt):
    """A signal ended a command after a checkpoint. No `Exception`: libraries catch those, and Ray holds them back."""

    def __init__(self, signal_number: int | str) -> None:
        """A text for the number comes from libraries that make an exception anew from its class and message."""
        is_number = isinstance(signal_number, int)
        super().__init__(f"interrupted by signal {signal_number}" if is_number else signal_number)
        self.signal_number = int(signal_number) if is_number else int(signal.SIGINT)

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), (self.signal_number,)


class Stopped(Interrupted):
    """A stop after the current step was requested (`control/stop`)."""

    code = 0  # of the command

    def __init__(self, step: int, why: str = "as requested") -> None:
        super().__init__(f"stopped after step {step}, {why}")
        self.step = step

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), (self.step,)


class OutOfTime(Stopped):
    """The time of the run is over (`trainer.hours`)."""

    code = 128 + signal.SIGTERM  # so that what begins stopped runs again does so

    def __init__(self, step: int, hours: float) -> None:
        super().__init__(step, f"since trainer.hours={hours:g} have passed")
        self.hours = hours

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), (self.step, self.hours)


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, its cause, the cause of that, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
