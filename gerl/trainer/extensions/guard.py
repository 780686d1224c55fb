"""Compare held-out images with those of the first validation, and act on signs of reward hacking (guard.action)."""

import logging
from collections.abc import Sequence
from dataclasses import asdict

from gerl.errors import GuardError
from gerl.run.choice import best_checkpoint
from gerl.run.guard import Baselines, GuardLog, Signal, TrainingTrends, found_signals
from gerl.run.tracking import METRICS, read_metrics
from gerl.run.validation import validation_steps
from gerl.trainer.extensions import kl_weight
from gerl.trainer.run import Extension, Run
from gerl.trainer.step import Directive, RollBack, Save, Step, Stop
from gerl.trainer.validation import load_scores

logger = logging.getLogger(__name__)


class HackingGuard(Extension):
    """Warn, stop the run, or roll it back to the best earlier checkpoint."""

    log: GuardLog
    baselines: Baselines

    def starting(self, run: Run) -> None:
        self.log = GuardLog(run.run_dir, run.state.step)
        if not (self.log.empty and not run.state.returns) and self.config.guard.action != "off":
            kl_weight.join(run, self.log, self.measured)
        config = asdict(self.config)
        self.baselines = Baselines(config | {"trainer": config["trainer"] | {"steps": run.plan.steps}})
        looks = validation_steps(run.run_dir, "look")
        for earlier in sorted({*validation_steps(run.run_dir), *looks}):
            name = "look" if earlier in looks else "step"
            if earlier <= run.state.step and (scores := load_scores(run.run_dir, earlier, name)) is not None:
                (self.baselines.add_look if name == "look" else self.baselines.add)(scores)

    def validated(self, run: Run, step: Step) -> None:
        """Log the signals, which also keep the checkpoint from being the best, and act on them."""
        later, baselines, first = step.validation, self.baselines, self.baselines.first
        if later is None or self.config.guard.action == "off":
            return
        if self.config.guard.action in ("rollback", "stop"):
            step.directives.append(Save())  # a candidate to return to, or to export
        trends = TrainingTrends(read_metrics(run.run_dir / METRICS))
        trends.add({"step": step.number, **step.metrics})
        trends.validated = [number for number in validation_steps(run.run_dir) if number <= step.number]
        tested = baselines.tests(later, trends, not self.config.algorithm.moves_reference)
        baselines.add(later)
        if first is not None and first.step < later.step:
            self._act(run, step, tested)
            before = (
                [] if first.prompts == later.prompts else run.state.signals
            )  # a resumed run's other prompts say nothing
            run.flag([*before, *(signal.key for signal in step.signals)])

    def looked(self, run: Run, step: Step) -> bool:
        """Log and act on the signals of a look as on those of a validation; the latter's stay until the next one."""
        assert step.look is not None
        tested = self.baselines.tests_of_look(step.look)
        if self.baselines.asks_for_more(step.look, tested):
            return True
        self._act(run, step, tested)
        self.baselines.add_look(step.look)
        run.flag([*run.state.signals, *(signal.key for signal in step.signals)])
        return False

    def _act(self, run: Run, step: Step, tested: Sequence[Signal]) -> None:
        guard = self.config.guard
        counted = [signal for signal in tested if guard.counts(signal.name, signal.column)]
        step.signals = found_signals(counted, self.baselines.config, run.state.signals)
        for signal in self.log.add(step.signals, guard.action):
            sentence = f"step {signal.step}: guard, {signal.key}: {signal.sentence}"
            logger.warning("%s", sentence)
            run.notify("alerted", signal.step, sentence)
        step.metrics["guard/signals"] = float(len(step.signals))
        if step.signals and kl_weight.NAME not in run.extensions:
            kl_weight.join(run, self.log, self.measured)
        if step.signals and guard.action == "stop":
            step.directives.append(Stop(self._ended(step.signals)))
        elif step.signals and guard.action == "rollback" and not self._measures_next(run, step):
            step.directives.append(self._roll_back(run, kl_weight.FACTOR))

    def _measures_next(self, run: Run, step: Step) -> bool:
        """Whether the step after `step` measures the weight of the KL, after which the run is rolled back."""
        extension = run.extensions.get(kl_weight.NAME)
        return (
            isinstance(extension, kl_weight.MeasuredKL) and extension.is_due(run) and step.number < run.plan.last_step
        )

    def measured(self, run: Run, step: Step) -> None:
        """Roll the run back for the signals of the step before `step`, with the weight that `step` has measured."""
        if self.config.guard.action == "rollback" and self.log.latest and self.log.latest[0].step == step.number - 1:
            step.directives.append(self._roll_back(run))

    def _roll_back(self, run: Run, factor: float = 1.0) -> Directive:
        """Choose the checkpoint to return to, or stop if there is none or the run rolled back too often.

        `factor`: of the weight of the KL.
        """
        guard, signals = self.config.guard, self.log.latest
        run.fleet.writer.finish()
        checkpoint = best_checkpoint(run.run_dir / "checkpoints", signals[0].step)
        if checkpoint is None:
            return Stop(self._ended(signals, "there is no earlier checkpoint with a held-out reward; "))
        if len(run.state.returns) >= guard.rollbacks:
            why = f"it has already rolled back guard.rollbacks={guard.rollbacks} times; "
            return Stop(self._ended(signals, why))
        before = run.algorithm.kl_coef
        raised = factor * before or None  # None: the next step measures it
        error = None
        if checkpoint.step in run.state.returns:  # training from there once more leads to the same signals
            with_kl = "" if not before else f" although algorithm.kl_coef was {before:g}"
            remedy = "" if raised is None else f", or resume it with algorithm.kl_coef={kl_weight.FACTOR * raised:g}"
            why = f"it is back at step {checkpoint.step} again{with_kl}: take that checkpoint{remedy}; "
            error = self._ended(signals, why)
        return RollBack(checkpoint, raised, tuple(signals), error)

    def rolled_back(self, run: Run, directive: RollBack) -> None:
        sentence = self.log.rolled_back_row(run.state.step, directive.signals, directive.kl_coef)
        logger.warning("step %d: guard: %s", run.state.step, sentence)
        run.notify("alerted", run.state.step, sentence)
        if directive.kl_coef is not None:
            self.log.advise(run.state.step, directive.kl_coef, sentence, self.config.guard.action)

    def _ended(self, signals: list[Signal], why: str = "") -> GuardError:
        """Build the error that ends the run after the last validation; `why` says why it does not roll back."""
        first, *others = signals
        also = f" (and {', '.join(signal.key for signal in others)})" if others else ""
        return GuardError(
            f"step {first.step}: guard.action={self.config.guard.action} ended the run for {first.key}{also}: "
            f"{first.text}; {why}check the images in the report, and change the reward, or continue with "
            f"guard.ignored=[{','.join(signal.key for signal in signals)}] or guard.action=warn"
        )
