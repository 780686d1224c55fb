"""What a run has observed: rows of metrics, validations and saved steps."""

from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image

from gerl.run.checkpoint import RunState
from gerl.run.tracking import MetricsLog
from gerl.run.validation import Estimate, Validation
from gerl.trainer.step import Metrics


@dataclass
class History:
    """Observations of a run in `run_dir` until now, which the loop adds and everything else reads.

    Example: after step 40 of a run that validates and saves every 20 steps, `validated` and `saved` are 40, `reward` is
    the mean held-out reward of step 40, and `gain` that over step 0.
    """

    run_dir: Path
    started: float  # time of `time.perf_counter`
    latest: Metrics = field(default_factory=dict)  # the last row of metrics
    validated: int | None = None  # step of the last validation
    reward: float | None = None  # its mean reward; None: a score is missing
    metrics: Metrics = field(default_factory=dict)  # its metrics, those that are finite
    gain: Estimate | None = None  # of the held-out reward over the first validation
    saved: int | None = None  # step of the last checkpoint
    log_start: int = -1  # the last step whose row of metrics was kept when the log was opened
    log: MetricsLog = field(init=False)

    def add_validation(
        self, validation: Validation, reward: float | None, metrics: Metrics, gain: Estimate | None
    ) -> None:
        """Add a validation with its mean reward, metrics, and gain over the first one."""
        self.validated, self.reward, self.metrics, self.gain = validation.step, reward, metrics, gain

    def return_to(self, state: RunState) -> None:
        """Continue from a checkpoint."""
        self.validated = self.saved = state.step
        self.reward, self.metrics = state.val_reward, state.val_metrics

    def open_log(self, kept: int) -> None:
        """Open the log of metrics after step `kept`."""
        self.log_start, self.log = kept, MetricsLog(self.run_dir, start_step=kept)

    def add_row(self, number: int, metrics: Metrics) -> None:
        """Write the row of a step."""
        self.log.log(number, metrics)
        self.latest = metrics

    def picture(self, number: int, name: str, image: Image.Image) -> Path:
        """Save an image as `samples/NAME_STEP.png`; returns its path."""
        return self.log.image(number, name, image)
