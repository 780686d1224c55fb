"""The protocol of trackers: the run that they are given, and the calls that they take."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import requests

from gerl.errors import GerlError
from gerl.run.redaction import redact

PROJECT = "gerl"  # where neither logger.project nor the tracker's own settings name one
REACHED = 5.0  # seconds in which a server has to answer


@dataclass(frozen=True)
class TrackedRun:
    """A run as trackers know it.

    `config`: nested values without secrets; `text`: the same as config.yaml has it, or empty. `start_step`: the step
    that a resumed run carries on from. `id`: of the tracker's own run, if there is one to go on with.
    """

    folder: Path
    name: str
    project: str | None = None
    tags: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    text: str = ""
    start_step: int = 0
    id: str | None = None


class Sink(Protocol):
    """Takes what a run writes, besides `metrics.jsonl`."""

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Take the metrics of a step; all are finite."""

    def image(self, step: int, name: str, path: Path) -> None:
        """Take a picture, such as `samples/train`, which is a file of the run folder."""

    def lora(self, step: int, files: dict[str, bytes]) -> None:
        """Take the LoRA of a checkpoint: its files by name."""

    def alert(self, step: int, sentence: str) -> None:
        """Take a warning about the run."""

    def close(self, failed: bool = False) -> None:
        """Write out what is buffered, and say whether the run failed; may be called twice."""


class Remote(Protocol):
    """A tracker of a package of somebody else: lives in a process of its own, where it may raise.

    `project`, `name` and `id` say which run of its own it writes to, `place` where that is found.
    """

    project: str
    name: str
    id: str
    place: str

    def __init__(self, run: TrackedRun) -> None:
        """Import the package, and begin a run or go on with the one that `run.id` names."""

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Take the metrics of a step; all are finite."""

    def image(self, step: int, name: str, path: Path) -> None:
        """Take a picture."""

    def lora(self, step: int, folder: Path) -> None:
        """Take the LoRA of a checkpoint; the folder is removed afterwards."""

    def alert(self, step: int, sentence: str) -> None:
        """Take a warning about the run."""

    def close(self, failed: bool) -> None:
        """Send the rest and end the tracker's run."""


def reach(url: str, otherwise: str) -> None:
    """Raise `GerlError`, with what to do, if nothing answers at `url`: the packages themselves try for minutes."""
    try:
        requests.head(url, timeout=REACHED)
    except requests.Timeout:
        raise GerlError(f"{redact(url)} did not answer within {REACHED:.0f} s ({otherwise})") from None
    except requests.RequestException as error:
        raise GerlError(f"{redact(url)} cannot be reached ({otherwise})") from error
