"""Raise the weight of the KL when the guard sees signs of reward hacking (guard.action=kl)."""

import logging

from gerl.config import Config
from gerl.trainer.extensions import Extension
from gerl.trainer.run import Run
from gerl.trainer.step import Step

logger = logging.getLogger(__name__)


class RaiseKL(Extension):
    """Multiply the weight by guard.kl_factor, up to guard.kl_most."""

    @classmethod
    def wanted(cls, config: Config) -> bool:
        return config.guard.action == "kl"

    def logged(self, run: Run, step: Step) -> None:
        if not step.signals:
            return
        before, coef = run.algorithm.kl_coef, self.config.guard.raised(run.algorithm.kl_coef)
        run.set_kl_coef(coef)
        if coef > before:
            logger.warning("step %d: guard: the weight of the KL changes from %g to %g", step.number, before, coef)
        else:
            logger.warning("step %d: guard: the weight of the KL stays at %g (guard.kl_most)", step.number, before)
