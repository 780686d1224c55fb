"""Follow the files in `control/` of the run folder, written by the page of `gerl watch` or by hand."""

import logging

from gerl.errors import Stopped
from gerl.run.session import FOLDER, Command, take
from gerl.trainer.run import Extension, Run
from gerl.trainer.step import Save, Step

logger = logging.getLogger(__name__)


class ControlFiles(Extension):
    """Validate, save or stop on request."""

    def requested(self, run: Run, command: Command) -> bool:
        return (run.run_dir / FOLDER).exists() and take(run.run_dir, command)

    def stepping(self, run: Run) -> None:
        """Raise `Stopped` if a stop was requested."""
        if self.requested(run, "stop"):
            raise Stopped(run.state.step)

    def due(self, run: Run, step: Step) -> bool:
        if self.requested(run, "save"):
            logger.info("step %d: saving a checkpoint, as requested", step.number)
            step.directives.append(Save())
        if not self.requested(run, "validate"):
            return False
        if run.plan.held_out:
            logger.info("step %d: validating, as requested", step.number)
        else:
            logger.info(
                "step %d: a validation was requested, but there are no held-out prompts (validation.data)", step.number
            )
        return True
