"""Measure the weight of the KL that balances the reward, after the guard's first signals (guard.kl_share)."""

import logging
import math
from collections.abc import Callable

from gerl.algorithms import KLWeight, count_pairs
from gerl.config import Config
from gerl.errors import ClusterError
from gerl.run.guard import GuardLog
from gerl.trainer.run import Extension, Run
from gerl.trainer.step import Step
from gerl.trainer.update import has_signal, split_by_task, split_rollout_and_dataset
from gerl.utils.tensors import PackedTensors
from gerl.workers.kl_gradient import balancing_weight, drop_gradients

logger = logging.getLogger(__name__)
NAME = "kl_weight"  # in `Run.extensions`
FACTOR = 2.0  # of the weight at later signals


class MeasuredKL(Extension):
    """Joins a run at its first signals (`join`): steps before them do not call it."""

    takes_gradients = True

    def __init__(self, config: Config, log: GuardLog, measured: Callable[[Run, Step], None]) -> None:
        """`measured`: called at the end of the step in which the measurement was made or failed."""
        super().__init__(config)
        self.log, self.measured = log, measured
        self.weight = math.nan
        self.failed = self.tried = False

    def is_due(self, run: Run) -> bool:
        """Whether the next step with different rewards measures the weight."""
        if self.failed or run.state.kl_coef is not None:
            return False
        # a run that goes on with an action has to use what it only named before
        return not (self.log.advised - {"warn"} if self.config.guard.raises_kl else self.log.advised)

    def credited(self, run: Run, step: Step) -> None:
        """Measure the weight on the images of a step, and use it."""
        assert step.credit is not None
        self.tried = self.is_due(run) and has_signal(step.credit, run.algorithm.all_samples)
        if not self.tried:
            return
        balance = self._balance(run, step)
        self.failed = math.isnan(balance)
        if self.failed:
            return
        # two digits: it is to be read
        self.weight = max(float(f"{self.config.guard.kl_share * balance:.2g}"), FACTOR * run.algorithm.kl_coef)
        if self.config.guard.raises_kl:
            run.set_kl_coef(self.weight)

    def _balance(self, run: Run, step: Step) -> float:
        """Return the weight that makes the gradients equally large; NaN, with a line in the log, if it is unknown."""
        assert step.credit is not None
        tasks, _ = split_rollout_and_dataset(step.tasks, run.algorithm)
        credit = PackedTensors(split_by_task(tasks, step.credit))
        factors = None if step.kl_weight is None else PackedTensors(split_by_task(tasks, step.kl_weight))
        pairs = count_pairs([(task, credit[task.id]) for task in tasks])
        reason = "one of the two gradients is 0 or not finite"
        try:
            balance = balancing_weight(run.fleet, credit, pairs, KLWeight(0.0, factors))
        except ClusterError:  # a worker died: the step is repeated
            raise
        # a measurement must not end a run that may not even use it
        except Exception as error:
            logger.debug("the weight of the KL was not measured", exc_info=True)
            balance, reason = math.nan, str(error) or type(error).__name__
            drop_gradients(run.fleet)  # raises `ClusterError` if the cause is the death of a worker
        if math.isnan(balance):
            logger.warning(
                "step %d: guard: the weight of the KL could not be measured (%s): set algorithm.kl_coef to use one",
                *(step.number, reason),
            )
        return balance

    def updated(self, run: Run, step: Step) -> None:
        """Log the measured weight, once the step is sure to be finished."""
        if not math.isnan(self.weight):
            guard, weight, self.weight = self.config.guard, self.weight, math.nan
            text = (
                f"with algorithm.kl_coef={weight:g} the gradient of the KL to the base model is {guard.kl_share:g} "
                f"times as large as that of the reward in step {step.number}, which keeps the images nearer to the "
                "base model's"
            )
            text = f"{text}; used from this step on" if guard.raises_kl else text
            self.log.advise(step.number, weight, text, guard.action)
            logger.warning("step %d: guard: %s", step.number, text)
        if self.tried:
            self.measured(run, step)

    def logged(self, run: Run, step: Step) -> None:
        """With guard.action=kl raise the weight at signals after the step that measured it."""
        before, is_measured = run.algorithm.kl_coef, not (self.tried or self.is_due(run))
        if step.signals and before > 0 and is_measured and self.config.guard.action == "kl":
            run.set_kl_coef(FACTOR * before)
            logger.warning(
                "step %d: guard: the weight of the KL rises from %g to %g", step.number, before, FACTOR * before
            )


def join(run: Run, log: GuardLog, measured: Callable[[Run, Step], None]) -> None:
    """Let the measurement join `run`, unless it can do nothing there; `measured`: see `MeasuredKL`."""
    config = run.config
    # ranks in lockstep wait for one that fails, so they measure only what they will train with
    if config.algorithm.subtracts_kl or (config.lockstep and not config.guard.raises_kl):
        return
    run.add_extension(NAME, MeasuredKL(config, log, measured))
