"""What travels between driver and workers: typed records, no string-keyed batches.

*prompt*: a row of a prompt file. *group*: the images of one prompt in one trainer step. *sample*: one image.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Prompt:
    """A row of a prompt file: `id` is its index there, so that equal texts stay different prompts."""

    id: int
    text: str
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sample:
    """One image to draw: sample number `index` of the group of `prompt` in trainer step `step`.

    Its noise is drawn from `seed` alone, so it is the same on any worker. `policy_version` counts the optimizer steps
    behind the weights that draw it.
    """

    prompt: Prompt
    index: int
    seed: int
    step: int
    policy_version: int = 0

    @property
    def group_id(self) -> int:
        """Samples are compared within a group: here, those of one prompt."""
        return self.prompt.id


@dataclass(frozen=True)
class RolloutTask:
    """A micro-batch: samples denoised together in one pipeline call, with noise at the steps of `window`."""

    id: int
    samples: list[Sample]
    window: tuple[int, ...]


@dataclass(frozen=True)
class Images:
    """What a worker returns for a task; the trajectories stay with the worker under `task_id`."""

    task_id: int
    pixels: np.ndarray  # [B, H, W, 3] uint8
    seconds: float


@dataclass(frozen=True)
class ScorerFailure:
    """A scorer had no score for a sample: which one, and why."""

    scorer: str
    reason: str


@dataclass(frozen=True)
class Scores:
    """Rewards of one micro-batch, in its order. A failed sample has no total and at least one failure."""

    totals: list[float | None]  # [B] weighted sum over scorers
    by_scorer: dict[str, list[float | None]]  # scorer -> [B]
    failures: list[list[ScorerFailure]]  # [B]
    seconds: float


@dataclass
class UpdateStats:
    """Sums over trained (sample, timestep) pairs, so that workers and micro-batches add up to the same averages."""

    pairs: int = 0
    loss: float = 0.0
    kl: float = 0.0
    clip_low: float = 0.0
    clip_high: float = 0.0
    log_ratio: float = 0.0
    ratio_deviation: float = 0.0  # max |ratio - 1|

    def __add__(self, other: "UpdateStats") -> "UpdateStats":
        return UpdateStats(
            self.pairs + other.pairs,
            self.loss + other.loss,
            self.kl + other.kl,
            self.clip_low + other.clip_low,
            self.clip_high + other.clip_high,
            self.log_ratio + other.log_ratio,
            float(np.maximum(self.ratio_deviation, other.ratio_deviation)),  # a NaN stays one
        )


@dataclass(frozen=True)
class StepResult:
    """An optimizer step: gradient norm before clipping, learning rate used, and whether it was taken."""

    grad_norm: float
    lr: float
    applied: bool
