"""Show the progress of the run: a bar on a terminal, else a log line at intervals."""

import math

from gerl.progress import Progress
from gerl.trainer.run import Extension, Run
from gerl.trainer.step import Step


class ProgressBar(Extension):
    """The count of steps with the latest reward and held-out reward."""

    bar: Progress | None = None
    ready = False  # the model is loaded

    def starting(self, run: Run) -> None:
        self.ready = True

    def stepping(self, run: Run) -> None:
        first = run.state.step == 0 and run.plan.held_out and run.history.validated is None
        if not self.ready or first:  # the time of a step is not that of the start, nor of the first validation
            return
        done = run.state.step - bool(run.state.unlogged)  # the last step may have been interrupted
        if self.bar is None:
            self.bar = Progress(run.plan.steps, done, disable=not self.config.logger.progress)
        if done != self.bar.done:
            self.bar.go_back(done)

    def concluded(self, run: Run, step: Step) -> None:
        if self.bar is None or not step.number:
            return
        values: dict[str, float | str | None] = {"reward": step.metrics.get("reward/mean")}
        if run.history.reward is not None:
            has_interval = run.history.gain is not None and not math.isnan(run.history.gain.low)
            sure = (
                f" ({run.history.gain.low:+z.3f} to {run.history.gain.high:+z.3f})"
                if has_interval and run.history.gain
                else ""
            )
            values["held-out"] = f"{run.history.reward:.3f}{sure}"
        self.bar.update(values=values)

    def ended(self, run: Run, error: BaseException | None) -> None:
        if self.bar is not None:
            self.bar.close()
