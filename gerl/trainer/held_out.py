"""The validations of a run: kept with pictures, compared with its first one, and looked at by the guard."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict

import numpy as np

from gerl.cluster import Pending
from gerl.config import Config
from gerl.errors import GerlError, GuardError
from gerl.protocol import Images, ModelFacts, Sample
from gerl.run.guard import GuardLog, Signal, raise_peaks, signals
from gerl.run.guard_course import Course, best_of, course_signals
from gerl.run.statistics import Estimate
from gerl.run.tracking import Tracker, read_metrics
from gerl.run.validation import Validation, forget_pictures, load_validation, paired_gains, validation_steps
from gerl.trainer.credit import Metrics, Scored, conclude_validation
from gerl.trainer.pictures import chosen_pixels, keep_pictures, shown_images

logger = logging.getLogger(__name__)


class HeldOut:
    """Keeps and compares validations; `reward` and `gain` are those of the last one, where all its images have one."""

    def __init__(self, config: Config, tracker: Tracker, step: int, reward: float | None) -> None:
        self.config, self.tracker, self.reward = config, tracker, reward
        self.gain: Estimate | None = None
        self.guard = GuardLog(tracker.run_dir, step)
        self.fired: list[Signal] = []
        self.peaks: dict[str, Validation] = {}
        self.course = Course(read_metrics(tracker.run_dir / "metrics.jsonl"))
        self.best: Validation | None = None  # with the highest reward after the first one
        for earlier in validation_steps(tracker.run_dir):
            if earlier <= step and (found := self._load(earlier)) is not None:
                self._remember(found)

    def _remember(self, found: Validation) -> None:
        raise_peaks(self.peaks, found)
        self.best = best_of([found] if self.best is None else [self.best, found], found.step + 1)

    def conclude(
        self,
        step: int,
        scored: Scored,
        images: Sequence[Pending[Images]],
        batches: Sequence[Sequence[Sample]],
        model: ModelFacts,
        device: str,
    ) -> Metrics:
        """Keep the validation after `step`, log it, and return its metrics.

        images: as they were drawn, by micro-batch. Raises what `keep_pictures` and `conclude_validation` do.
        """
        shown = shown_images(len(scored.samples), self.config.validation)
        pixels, looks = chosen_pixels(images, batches, shown)
        found = keep_pictures(self.tracker, step, scored, pixels, shown, model, device, looks)
        first = self._first()
        gains = paired_gains(first, found) if first is not None and first.step < step else {}
        self.gain = gains.get("reward")
        metrics, self.reward = conclude_validation(self.config, scored, step, self.gain)
        metrics |= gain_metrics(gains) | self._guarded(first, found)
        if self.config.validation.keep is not None:
            forget_pictures(self.tracker.run_dir, self.config.validation.keep)
        return metrics

    def _first(self) -> Validation | None:
        """The first validation, whose images had the same noise; a damaged one is compared with nothing."""
        steps = validation_steps(self.tracker.run_dir)
        return self._load(steps[0]) if steps else None

    def _load(self, step: int) -> Validation | None:
        try:
            return load_validation(self.tracker.run_dir, step, pictures=False)
        except GerlError:
            return None

    def _guarded(self, first: Validation | None, found: Validation) -> Metrics:
        """Log signs of reward hacking or collapse; with `guard.action=rollback` the validation has no reward then."""
        guard, algorithm = self.config.guard, self.config.algorithm
        if guard.action == "off" or first is None:
            return {}
        fired = signals(first, found, asdict(self.config), self.peaks, guard.importance)
        fired += course_signals(self.course, first, self.best or first, found, not algorithm.moves_reference)
        self._remember(found)
        self.course.validated.append(found.step)
        if first.step >= found.step:
            return {}
        self.fired = [signal for signal in fired if guard.counts(signal.name, signal.column)]
        for signal in self.guard.add(self.fired, guard.action):
            sentence = f"step {signal.step}: guard, {signal.key}: {signal.text}"
            logger.warning("%s", sentence)
            self.tracker.alert(signal.step, sentence)
        if self.fired and guard.action == "rollback":
            self.reward = None
        return {"guard/signals": float(len(self.fired))}

    def check(self) -> None:
        """Raise `GuardError` if the run is to end for what the last validation showed."""
        if self.fired and self.config.guard.action == "stop":
            raise self.ended()

    def ended(self, why: str = "") -> GuardError:
        """The error of a run that ends for what the last validation showed; `why` it does not go back."""
        first, *others = self.fired
        also = f" (and {', '.join(signal.key for signal in others)})" if others else ""
        return GuardError(
            f"step {first.step}: guard.action={self.config.guard.action} ended the run for {first.key}{also}: "
            f"{first.text}; {why}check the images in the report, and change the reward, or continue with "
            f"guard.ignored=[{','.join(signal.key for signal in self.fired)}] or guard.action=warn"
        )

    def postfix(self) -> dict[str, str]:
        """The entries of the progress bar."""
        if self.reward is None:
            return {}
        known = self.gain is not None and not math.isnan(self.gain.low)
        sure = f" ({self.gain.low:+.3f} to {self.gain.high:+.3f})" if known and self.gain is not None else ""
        return {"held-out": f"{self.reward:.3f}{sure}"}


def gain_metrics(gains: Mapping[str, Estimate]) -> Metrics:
    """`val/NAME/gain` over the first validation, and the ends of its 95 % interval."""
    metrics: Metrics = {}
    for name, gain in gains.items():
        parts = {"gain": gain.mean, "gain_low": gain.low, "gain_high": gain.high}
        metrics |= {f"val/{name}/{part}": value for part, value in parts.items() if not np.isnan(value)}
    return metrics
