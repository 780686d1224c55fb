"""DRTune (arXiv 2405.00760): the reward gradient of the image predicted at one late step, through a few steps."""

from __future__ import annotations  # torch is imported lazily

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from gerl.algorithms.common import predicted
from gerl.algorithms.draft import ReFLConfig, late_step
from gerl.algorithms.lazily import Tape
from gerl.algorithms.reward_gradient import (
    LatentJump,
    RewardEvaluation,
    RewardGradient,
    chain,
    generator,
    latent_derivative,
    mean,
)
from gerl.config.schema import main_key
from gerl.protocol import Sample


@dataclass(frozen=True)
class DRTuneConfig(ReFLConfig):
    """Keys of DRTune."""

    active: int = main_key(3, "steps whose denoiser calls have a gradient, selected at random each trainer step", low=1)


class DRTune(RewardGradient):
    """DRTune: ReFL with gradients through the rules of a few earlier steps; the inputs of the denoiser are detached."""

    names = "drtune"
    settings: DRTuneConfig

    def differentiated_steps(self, step: int) -> tuple[int, ...]:
        stop = self._stop(step)
        rng = generator(self.config.trainer.seed, step, "spread")
        return tuple(evenly_spread(stop + 1, self.settings.active, rng))

    def _stop(self, step: int) -> int:
        return late_step(self, self.settings.late, step)

    def trained_steps(self, window: tuple[int, ...], step: int) -> tuple[int, ...]:
        # the denoiser runs at the stop, possibly without gradient
        return tuple(sorted({*self.differentiated_steps(step), self._stop(step)}))

    def evaluations(self, tape: Tape, trained: tuple[int, ...], samples: Sequence[Sample]) -> list[RewardEvaluation]:
        step = samples[0].step
        stop, active = self._stop(step), self.differentiated_steps(step)
        at = LatentJump(stop, predicted)
        earlier = chain(tape, {k: (mean, 0.0) for k in active if k < stop}, end=stop)
        onward = partial(latent_derivative, tape, stop, clean=True)
        if earlier:
            first = earlier[0]
            earlier = (LatentJump(first.step, first.leads_to, (onward, *first.before), first.nested), *earlier[1:])
        return [RewardEvaluation((at, *earlier) if stop in active else earlier, at=at)]


def evenly_spread(total: int, count: int, rng: np.random.Generator) -> list[int]:
    """Return `count` of the first `total` steps at equal distances, with a random first step."""
    count = min(count, total)
    stride = total // count
    first = int(rng.integers(total - (count - 1) * stride))
    return [first + i * stride for i in range(count)]
