"""The validations of a run: kept with pictures, and compared with its first one."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from gerl.cluster import Pending
from gerl.config import Config
from gerl.errors import GerlError
from gerl.protocol import Images, ModelFacts, Sample
from gerl.run.statistics import Estimate
from gerl.run.tracking import Tracker
from gerl.run.validation import Validation, load_validation, paired_gains, validation_steps
from gerl.trainer.credit import Metrics, Scored, conclude_validation
from gerl.trainer.pictures import chosen_pixels, keep_pictures, shown_images


class HeldOut:
    """What validations find; `reward` and `gain` are those of the last one, where all its images have one."""

    def __init__(self, config: Config, tracker: Tracker) -> None:
        self.config, self.tracker = config, tracker
        self.reward: float | None = None
        self.gain: Estimate | None = None

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
        gains = self._gains(found)
        self.gain = gains.get("reward")
        metrics, self.reward = conclude_validation(self.config, scored, step, self.gain)
        return metrics | gain_metrics(gains)

    def _gains(self, found: Validation) -> Mapping[str, Estimate]:
        """By column, how much the images are better than those of the first validation, which had the same noise."""
        steps = validation_steps(self.tracker.run_dir)
        try:
            first = load_validation(self.tracker.run_dir, steps[0], pictures=False)
        except (IndexError, GerlError):  # a damaged one is compared with nothing; reports say so
            return {}
        return paired_gains(first, found) if first.step < found.step else {}

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
