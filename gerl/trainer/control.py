"""Follows what somebody asks of the run while it trains, from the page of `gerl watch` or by hand."""

import logging
from pathlib import Path

from gerl.errors import Stopped
from gerl.run.control import take

logger = logging.getLogger(__name__)


class Control:
    """Looks for the files of `gerl.run.control`, and says what is done because of them."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    def validate(self, step: int, possible: bool) -> bool:
        """Whether a validation after `step` was asked for; where it is not `possible`, the log says why."""
        without = "step %d: a validation was requested, but there are no held-out prompts (validation.data)"
        return self._taken("validate", "step %d: validating, as requested" if possible else without, step)

    def save(self, step: int) -> bool:
        """Whether a checkpoint of `step` was asked for."""
        return self._taken("save", "step %d: saving a checkpoint, as requested", step)

    def stop(self, step: int) -> None:
        """Raise `Stopped` if the run was asked to end after `step`."""
        if take(self.run_dir, "stop"):
            raise Stopped(step)

    def _taken(self, command: str, sentence: str, step: int) -> bool:
        found = take(self.run_dir, command)  # type: ignore[arg-type]
        if found:
            logger.info(sentence, step)
        return found
