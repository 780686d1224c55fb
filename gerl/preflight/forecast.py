"""Forecast of a trainer step from one micro-batch that was measured: seconds, memory, and which sizes fit."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gerl.algorithms.planning import update_parts
from gerl.config import Config
from gerl.preflight.measure import Line, Usage, through
from gerl.protocol import RolloutTask, Segment

SPARE = 0.1  # share of the memory that is left free: allocators cannot use all of it


@dataclass(frozen=True)
class Run:
    """A micro-batch that was drawn and trained on."""

    images: int
    drawn: int  # rows denoised together
    trained: int  # rows of a forward and backward
    rollout: Usage
    update: Usage
    step_seconds: float  # of the optimizer
    trajectories: int  # bytes of the tapes, which stay until the end of a trainer step
    deviation: float | None  # max |ratio - 1|; None where the algorithm has no such ratio
    finite: bool  # the gradient
    gradients: dict[str, int]  # denoiser -> LoRA modules that got a gradient
    unit: str  # image or video


@dataclass(frozen=True)
class Seconds:
    """Of a trainer step; without rewards, validation and checkpoints."""

    images: int
    images_per_worker: int  # of the worker that has most
    rollout: float
    update: float

    @property
    def step(self) -> float:
        """Rollout and update."""
        return self.rollout + self.update


@dataclass(frozen=True)
class Memory:
    """Of one worker in a trainer step, in bytes; None: not known. Sizes are in images and at most those of a step."""

    capacity: int | None
    trajectories: float
    rollout: float | None
    update: float | None
    largest_rollout: int | None  # micro-batch that fits; 0: none does
    largest_update: int | None
    validation: float | None  # drawing a micro-batch of held-out prompts


def sized(config: Config, rollout: int, actor: int) -> Config:
    """`config` with other micro-batches."""
    return replace(
        config,
        rollout=replace(config.rollout, micro_batch_size=rollout),
        actor=replace(config.actor, micro_batch_size=actor),
    )


def rows_of(segments: Sequence[Segment]) -> int:
    """The most rows that are denoised, or trained, together."""
    return max(len(segment.seeds) for segment in segments)


def busiest(tasks: Sequence[RolloutTask], workers: int) -> int:
    """Images of the worker that has most of them, when micro-batches are dealt out in turn by their ids."""
    images: Counter[int] = Counter()
    for task in tasks:
        images[task.id % workers] += len(task.samples)
    return max(images.values())


def forecast_seconds(config: Config, tasks: Sequence[RolloutTask], workers: int, run: Run, share: float) -> Seconds:
    """A step of `tasks` on `workers` like the one that did `run`; `share`: of the images that are trained on.

    Every image is in one of the updates of an epoch; each update waits for the worker with most to do.
    """
    parts = update_parts(tasks, config.actor.updates_per_step, config.algorithm.whole_groups) * config.actor.epochs
    drawn, trained = busiest(tasks, workers), sum(busiest(part, workers) for part in parts)
    rollout = drawn * run.rollout.seconds / run.images
    update = trained * share * run.update.seconds / run.images + len(parts) * run.step_seconds
    return Seconds(sum(len(task.samples) for task in tasks), drawn, rollout, update)


def forecast_memory(
    config: Config, runs: Sequence[Run], configured: Run, images: int, sizes: range, capacity: int | None
) -> Memory:
    """A worker that draws `images` a step, with peaks linear in the size of the micro-batch, through those of `runs`.

    All trajectories of a step are held until its end. `sizes`: those that a micro-batch may have. `capacity`: bytes
    that a worker can have.
    """
    held = configured.trajectories / configured.images
    # without trajectories, of which every micro-batch brought its own
    drawing = {r.drawn: r.rollout.peak - r.trajectories for r in runs if r.rollout.peak is not None}
    training = {r.trained: r.update.peak - r.trajectories for r in runs if r.update.peak is not None}
    lines = through(drawing), through(training)
    limit = None if capacity is None else (1 - SPARE) * capacity - held * images

    def largest(line: Line | None) -> int | None:
        if line is None or limit is None:
            return None
        return max((n for n in sizes if line.at(n) <= limit), default=0)

    def needed(peaks: dict[int, int], size: int) -> float | None:
        return peaks[size] + held * images if size in peaks else None

    validation = None
    if lines[0] is not None and config.validation.data is not None:
        validation = lines[0].at(config.validation.micro_batch_size)
    rollout, update = needed(drawing, configured.drawn), needed(training, configured.trained)
    return Memory(capacity, held * images, rollout, update, largest(lines[0]), largest(lines[1]), validation)
