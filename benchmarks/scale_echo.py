"""A worker that answers like gerl's and computes nothing; it imports no torch of its own, so that many find room."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gerl.protocol import CutPrompts, Images, ModelFacts, Prompt, RolloutTask, StepResult, UpdateStats

STATISTICS = ("log_ratio_abs", "log_ratio_std", "clip_fraction_low", "clip_fraction_high", "loss")


@dataclass(frozen=True)
class Pace:
    """Seconds of a denoiser an image and call; of an `Echo`, an image drawn, and the size of it."""

    image: float
    size: tuple[int, int] = (32, 96)


class Echo:
    """Has what the driver asks of a worker, with answers of the same types and sizes."""

    def __init__(self, rank: int, pace: Pace) -> None:
        self.rank, self.pace, self.images, self.updates = rank, pace, 0, 0
        self.generator = np.random.default_rng(rank)

    def sample(self, task: RolloutTask) -> Images:
        start, count = time.perf_counter(), len(task.samples)
        time.sleep(self.pace.image * count)
        self.images += count
        pixels = self.generator.integers(0, 255, (count, *self.pace.size, 3), np.uint8)
        return Images(task.id, pixels, time.perf_counter() - start)

    def accumulate(self, credit: dict[int, Any], pairs: int, pooled: Any, groups: Any, kl: Any) -> UpdateStats:
        time.sleep(self.pace.image * self.images)
        sums = {name: float(self.generator.random()) for name in STATISTICS}
        squares = {k: (float(self.generator.random()), 1) for k in range(3)} if self.rank == 0 else {}
        return UpdateStats(self.images, sums, 0.0, squares)

    def step(self, finished: int, together: bool, last: bool, resets: bool) -> StepResult:
        return StepResult(1.0, 1e-4, True, 0.1, 1e-3, self.finish_step(finished + 1) if last else None)

    def finish_step(self, step: int, resets: bool = False) -> StepResult:
        self.images = 0
        return StepResult(ended=True)

    def checkpoint(self, step: int) -> tuple[dict[str, bytes], None]:
        return {"state.safetensors": b""}, None

    def call(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Ignore a request for a worker with a model."""

    def join(self, address: str, rank: int, ranks: int) -> None:
        """There are no collective calls."""

    def setup(self, remote: bool) -> ModelFacts:
        """There is no model."""
        return ModelFacts("none", ["none"], 1, False, "none", [], None, [], [])

    def cut_prompts(self, prompts: Sequence[str], like: Prompt) -> CutPrompts:
        return CutPrompts({}, 0)

    def leave(self) -> None:
        """Nothing is begun."""

    def report(self) -> dict[str, Sequence[tuple[float, float]]]:
        return {}
