"""Warn of signs that a run does not learn or has stopped learning."""

import logging
from dataclasses import asdict

from gerl.run.health import Health
from gerl.run.tracking import METRICS, read_metrics
from gerl.trainer.run import Extension, Run
from gerl.trainer.step import Step

logger = logging.getLogger(__name__)
NO_CREDIT = 1e-6  # the credit of equal rewards is 0 up to rounding


class HealthChecks(Extension):
    """Add the `health/` metrics, and log a warning with a remedy when one is out of range."""

    health: Health

    def starting(self, run: Run) -> None:
        self.health = Health(asdict(self.config))
        for row in read_metrics(run.run_dir / METRICS):
            self.health.observe(row)

    def updated(self, run: Run, step: Step) -> None:
        assert step.credit is not None
        signal = bool((step.credit.nan_to_num().abs() > NO_CREDIT).any())
        groups = [] if step.scores.given else list(step.scores.by_group().values())
        step.metrics |= self.health.measure(step.scores.by_scorer, signal, groups)

    def logged(self, run: Run, step: Step) -> None:
        if step.number:
            for sentence in self.health.observe({"step": step.number, **run.history.latest}):
                logger.warning("%s", sentence)
                run.notify("alerted", step.number, sentence)
