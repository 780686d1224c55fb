"""End the run after the step whose validation reaches a limit (trainer.stop_at)."""

import logging

from gerl.config import Config
from gerl.config.held_out import Goal
from gerl.errors import ConfigError
from gerl.trainer.run import Extension, Run
from gerl.trainer.step import Step

logger = logging.getLogger(__name__)


class StopAt(Extension):
    """Make the validated step the last one, which is saved like that of `trainer.steps`."""

    @classmethod
    def wanted(cls, config: Config) -> bool:
        return bool(config.trainer.stop_at)

    def starting(self, run: Run) -> None:
        run.plan.end_after(None)  # also after returning to an earlier step

    def validated(self, run: Run, step: Step) -> None:
        goal = Goal.parse(self.config.trainer.stop_at)
        if goal is None or not goal.reached(step.metrics):
            return
        if step.number == 0:
            raise ConfigError(f"{goal.words(step.metrics)}, before training: set a limit that it has not reached")
        logger.info("step %d: %s: the run ends here", step.number, goal.words(step.metrics))
        run.plan.end_after(step.number)
