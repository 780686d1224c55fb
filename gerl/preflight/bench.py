"""Measure micro-batches of several sizes on one worker: the configured size, or the largest that fits in memory."""

import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from diffusers import DiffusionPipeline
from PIL import Image

from gerl.algorithms import Algorithm, build_algorithm, count_pairs
from gerl.algorithms.planning import plan_samples
from gerl.config import Config
from gerl.data.sources import may_have_pictures, source_names
from gerl.errors import GerlError
from gerl.model.errors import CallRefused, MemoryFull
from gerl.preflight.findings import Report, Run, Usage, capacity, count_gradients, measured, release, rows_of, sized
from gerl.preflight.replay_checks import parts_difference, stock_difference
from gerl.protocol import Prompt, RolloutTask, SamplingProbe, UpdateStats
from gerl.trainer.extensions.kl_in_reward import kl_to_base
from gerl.utils.condition_images import COLUMNS, pictures_of
from gerl.workers.calibration import calibrate
from gerl.workers.gradient_check import LARGEST, GradientComparison, check_gradient, compare_gradient
from gerl.workers.setup import give_reward
from gerl.workers.worker import PolicyWorker

logger = logging.getLogger("gerl")
T = TypeVar("T")

TEXT = 'a photo of an old wooden door in a white wall, with a small blue sign beside it that reads "OPEN TODAY"'
SIDE = 512  # pixels of a synthetic image if the configuration sets no size


class TooLarge(GerlError):
    """The GPU's memory is too small for a micro-batch."""

    def __init__(self, phase: str, size: int) -> None:
        what = f"the {phase} of a micro-batch of {size}" if size else "the pipeline"
        super().__init__(
            f"the GPU's memory is too small for {what}: use model.offload=encoders, "
            "model.gradient_checkpointing=true, model.dtype=bfloat16, or lower sampling.height and width"
        )
        self.phase = phase


def attempt(phase: str, size: int, device: str, work: Callable[[], T]) -> tuple[T, Usage]:
    """Run `measured`. Raises `TooLarge` if the GPU runs out of memory."""
    try:
        return measured(device, work)
    except (torch.OutOfMemoryError, MemoryFull):
        pass  # the error raised below must not chain to this one, whose traceback keeps the tensors alive
    release(device)
    raise TooLarge(phase, size)


class Bench:
    """Runner of micro-batches of several sizes on one worker, all of one prompt."""

    def __init__(self, worker: PolicyWorker, prompt: Prompt) -> None:
        self.worker, self.prompt, self.config = worker, prompt, worker.config
        self.trained_steps: tuple[int, ...] = ()  # of the latest run

    @property
    def smallest(self) -> int:
        """Number of images in the smallest micro-batch that the algorithm can sample."""
        return self.config.algorithm.needs.sampled_images(self.config.rollout.n)

    def task(self, algorithm: Algorithm) -> RolloutTask:
        """Return the largest micro-batch that `algorithm` plans for copies of the prompt."""
        size, n = algorithm.config.rollout.micro_batch_size, algorithm.config.rollout.n
        # a micro-batch never mixes condition images of several prompts
        copies = 1 if pictures_of(self.prompt) else -(-size // n)
        prompts = [replace(self.prompt, id=i) for i in range(copies)]
        tasks = algorithm.plan(plan_samples(algorithm.config, prompts, 1, 0))
        return max(tasks, key=lambda task: rows_of(task.segments))

    def run(self, rollout: int, actor: int) -> Run:
        """Sample a micro-batch of `rollout` images and train on it in parts of at most `actor` images."""
        worker = self.worker
        worker.rollout.format.divides = worker.actor.divides = False  # no automatic splitting: find what does not fit
        algorithm = worker.algorithm = worker.actor.algorithm = build_algorithm(sized(self.config, rollout, actor))
        give_reward(algorithm, worker.device, {})  # a differentiable reward uses memory too
        task = self.task(algorithm)
        credit = alternating_credit(task, self.config)
        trained = [segment for segment in task.segments if segment.trained]
        self.trained_steps = tuple(sorted({k for segment in trained for k in segment.trained}))
        sampled, parts = rows_of(task.segments), min(actor, rows_of(trained))
        logger.info("%d images: rollout in micro-batches of %d, update of %d", len(task.samples), sampled, parts)
        try:
            images, rolled = attempt("rollout", sampled, worker.device, lambda: worker.sample(task))
            held = worker.trajectories[task.id].nbytes
            pairs = count_pairs([(task, credit)])
            stats, updated = attempt("update", parts, worker.device, lambda: update(worker, task, credit, pairs))
            gradients = {name: count_gradients(worker.policy.trained, name) for name in worker.policy.denoisers}
            result, stepped = attempt("optimizer step", parts, worker.device, lambda: worker.step(0))
        finally:
            worker.clear()
        count, unit = len(task.samples), "video" if images.pixels.ndim == 5 else "image"
        seconds, ratio = stepped.seconds, stats.ratio_deviation
        return Run(count, sampled, parts, rolled, updated, seconds, held, ratio, result.applied, gradients, unit)

    def plain_task(self, algorithm: Algorithm, rollout: int) -> RolloutTask:
        """Return a micro-batch of at most `rollout` images without branches."""
        prompts = [replace(self.prompt, id=i) for i in range(-(-rollout // self.config.rollout.n))]
        return Algorithm.plan(algorithm, plan_samples(algorithm.config, prompts, 1, 0))[0]

    def compare(self, rollout: int) -> tuple[float, float]:
        """Return `stock_difference` and `parts_difference` of a micro-batch of at most `rollout` images."""
        task = self.plain_task(build_algorithm(sized(self.config, rollout, rollout)), rollout)
        logger.info("%d images: sampled without noise, and trained one by one", len(task.samples))

        def compared() -> tuple[float, float]:
            return stock_difference(self.worker.rollout, task.samples), parts_difference(self.worker, task)

        return attempt("rollout", rollout, self.worker.device, compared)[0]

    def check_gradient(self, run: Run, half_precision: bool) -> GradientComparison | None:
        """Check the gradient of a micro-batch with the sizes of `run`, as the trainer does; raises `TrainingError`."""
        worker, whole = self.worker, sized(self.config, run.sampled, run.trained)
        algorithm = worker.algorithm = worker.actor.algorithm = build_algorithm(whole)
        give_reward(algorithm, worker.device, {})
        task = self.task(algorithm)
        credit = {task.id: alternating_credit(task, self.config)}
        pairs = count_pairs([(task, credit[task.id])])
        logger.info("%d images: gradient, with and without what saves memory and time", len(task.samples))

        def compare(kept: Sequence[str], reorder: bool) -> GradientComparison | None:
            pooled = worker.pool(credit) if algorithm.pools else None
            return compare_gradient(worker, credit, pairs, pooled, kept=kept, reorder=reorder)

        try:
            attempt("rollout", run.sampled, worker.device, lambda: worker.sample(task))
            return attempt(
                "update", run.trained, worker.device, lambda: check_gradient(compare, LARGEST[half_precision])
            )[0]
        finally:
            worker.clear()

    def probe(self, rollout: int) -> SamplingProbe:
        """Run the trainer's calibration probe on a micro-batch of `rollout` images."""
        algorithm = build_algorithm(sized(self.config, rollout, rollout))
        task = self.plain_task(algorithm, rollout)
        logger.info("%d images: numerical noise of the ratio", len(task.samples))
        return attempt("rollout", rollout, self.worker.device, lambda: calibrate(self.worker, task))[0]


def alternating_credit(task: RolloutTask, config: Config) -> torch.Tensor:
    """Return a credit of 1 and -1 in turn, [B, T]."""
    credit = torch.ones(len(task.samples), config.sampling.num_inference_steps)
    credit[1::2] = -1.0
    return credit


def update(worker: PolicyWorker, task: RolloutTask, credit: torch.Tensor, pairs: int) -> UpdateStats:
    """Accumulate the gradient of a sampled task as a worker does before the optimizer step."""
    algorithm = worker.config.algorithm
    if algorithm.subtracts_kl and algorithm.kl_coef > 0:
        kl_to_base(worker, task.id)
    by_task = {task.id: credit}
    return worker.accumulate(by_task, pairs, worker.pool(by_task) if worker.algorithm.pools else None)


def first_run(bench: Bench, from_file: bool, folder: Path, report: Report) -> Run:
    """Run the smallest micro-batch, with synthetic condition images in `folder` if the pipeline requires them.

    An argument with a default may still be required, so a refused call is retried with all image arguments. Without a
    prompt file they are supplied at once if its prompts may have condition images.
    """
    config, prompt, pipe = bench.config, bench.prompt, bench.worker.policy.pipe
    lacking = [name for name in picture_names(pipe, optional=True) if not prompt.metadata.get(name)]
    needed = [name for name in lacking if name in picture_names(pipe, not from_file and may_have_pictures(config.data))]
    refused: CallRefused | None = None
    for names in [needed] if needed == lacking else [needed, lacking]:
        bench.prompt = with_pictures(prompt, names, folder, config)
        try:
            first = bench.run(bench.smallest, bench.smallest)
        except CallRefused as error:
            refused = refused or error
            continue
        if names and from_file:
            report.problems.append(
                f"data.train={source_names(config.data.train)}: {report.pipeline} needs {' and '.join(names)}, but its "
                "rows have no such column: add it, with image paths (synthetic images are used here)"
            )
        elif names:
            report.notes.append(f"the images for {' and '.join(names)} are synthetic")
        return first
    assert refused is not None
    raise refused


def picture_names(pipe: DiffusionPipeline, optional: bool) -> list[str]:
    """Return the condition images that the pipeline requires, or also the `optional` ones."""
    parameters = inspect.signature(type(pipe).__call__).parameters
    return [n for n in COLUMNS if n in parameters and (optional or parameters[n].default is inspect.Parameter.empty)]


def with_pictures(prompt: Prompt, names: Sequence[str], folder: Path, config: Config) -> Prompt:
    """Return `prompt` with a grey image (white for a mask) for each of `names`, in the size of the images to sample."""
    metadata = dict(prompt.metadata)
    for name in names:
        colour = (255, 255, 255) if "mask" in name else (127, 127, 127)
        path = folder / f"{name}.png"
        Image.new("RGB", (config.sampling.width or SIDE, config.sampling.height or SIDE), colour).save(path)
        metadata[name] = str(path)
    return replace(prompt, metadata=metadata)


def further_runs(bench: Bench, first: Run, report: Report) -> list[Run]:
    """Run the configured micro-batch, halved until it fits, and a larger one if needed for a line through two sizes."""
    config, worker = bench.config, bench.worker
    configured = config.rollout.micro_batch_size, config.actor.micro_batch_size or config.rollout.micro_batch_size
    rollout, actor = configured
    while True:
        try:
            run = bench.run(rollout, actor)
            break
        except TooLarge as error:
            if (error.phase == "rollout" and rollout <= bench.smallest) or (error.phase != "rollout" and actor == 1):
                raise
            rollout = max(bench.smallest, rollout // 2) if error.phase == "rollout" else rollout
            actor = min(rollout, actor if error.phase == "rollout" else actor // 2)
    if (rollout, actor) != configured:
        report.problems.append(
            f"the GPU's memory is too small for rollout.micro_batch_size={configured[0]} with "
            f"actor.micro_batch_size={configured[1]}: {rollout} and {actor} fit, with which the numbers above were "
            "measured"
        )
    if config.model.compile or worker.device.startswith("cuda"):
        run = bench.run(rollout, actor)  # the first run also selects or compiles kernels
    larger = 2 * actor if run.trained == first.trained else actor
    sampled = max(larger, 2 * rollout if run.sampled == first.sampled else rollout)
    room, peak = capacity(worker.device), max(run.rollout.peak or 0, run.update.peak or 0)
    # a full GPU raises an error, but a process that runs out of main memory is killed
    if (sampled, larger) == (rollout, actor) or (worker.device == "cpu" and (room is None or room < 2 * peak)):
        return [run]
    try:
        return [run, bench.run(sampled, larger)]
    except TooLarge:
        return [run]
