"""Look at a run before starting it: `python -m gerl.preflight [experiment=NAME] [key=value ...] [out=FILE.json]`.

One prompt is drawn and trained on in this process, as a worker of the run would do it; the rewards are made up.
"""

import inspect
import json
import logging
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import diffusers
import torch
from PIL import Image

from gerl.algorithms import Algorithm, Rewards, build_algorithm, count_pairs
from gerl.algorithms.planning import plan_prompts, plan_samples, prompt_schedule
from gerl.algorithms.signal_checks import ratio_limit
from gerl.cluster import Cluster
from gerl.commandline.command import run_command
from gerl.commandline.composition import compose_run
from gerl.config import Config
from gerl.errors import ConfigError, DataError, GerlError, ModelError, TrainingError
from gerl.model.loading import resolve
from gerl.model.schedulers import SameSigmas
from gerl.preflight.findings import Report, judge_batches, judge_memory, judge_run
from gerl.preflight.forecast import Run, forecast_memory, forecast_seconds, rows_of, sized
from gerl.preflight.inventory import components, count_gradients
from gerl.preflight.measure import Usage, capacity, measured, release
from gerl.protocol import Images, Prompt, RolloutTask, SamplingProbe, UpdateStats
from gerl.utils import dataset
from gerl.utils.condition_images import COLUMNS, pictures_of
from gerl.workers.hybrid import HybridWorker

logger = logging.getLogger("gerl")
T = TypeVar("T")

TEXT = 'a photo of an old wooden door in a white wall, with a small blue sign beside it that reads "OPEN TODAY"'
TABLES = (".jsonl", ".parquet")  # prompt files whose columns may name pictures
SIDE = 512  # pixels of a made-up picture, where the configuration names no size
# what pipelines raise for arguments that they do not take, or do not take together
REFUSALS = (ValueError, TypeError, AttributeError, RuntimeError, LookupError, AssertionError)


class CallRefused(ModelError):
    """The pipeline raised an error of its own while it drew."""


class TooLarge(GerlError):
    """The GPU's memory does not hold what was asked for."""

    def __init__(self, phase: str, size: int) -> None:
        what = f"the {phase} of a micro-batch of {size}" if size else "the pipeline"
        super().__init__(
            f"the GPU's memory does not hold {what}: use model.offload=true, model.gradient_checkpointing=true, "
            "model.dtype=bfloat16, or lower sampling.height and width"
        )
        self.phase = phase


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0 if the configuration can train, otherwise see `run_command`."""
    return run_command(argv, help_text, lambda arguments: run(*parse(arguments)))


def parse(arguments: Sequence[str]) -> tuple[Config, Path | None]:
    """The configuration and the file for the report; raises `ConfigError` for what cannot be."""
    own = [argument for argument in arguments if argument.startswith("out=")]
    config = compose_run([argument for argument in arguments if argument not in own]).config
    if not own:
        return config, None
    out = Path(own[-1].removeprefix("out=")).expanduser()
    if out.suffix != ".json" or out.is_dir() or not out.absolute().parent.is_dir():
        raise ConfigError(f"{own[-1]}: give the path of a .json file in a folder that is there")
    return config, out


def help_text() -> str:
    """What the command does and reads."""
    return (
        "usage: python -m gerl.preflight [experiment=NAME|FILE.yaml] [key=value ...] [out=FILE.json]\n\n"
        "Load the model of a run, draw and train on one prompt, and say whether, and how fast, it can train.\n"
        "  out=FILE.json   the report for machines, besides that on the terminal\n\n"
        "The other keys are those of training: python -m gerl.trainer.main_flowgrpo --help all lists them.\n"
        "Neither rewards nor a prompt file are needed.\n"
    )


def run(config: Config, out: Path | None = None) -> Report:
    """Examine, log the report and write it to `out`; raises `TrainingError` if the configuration cannot train."""
    report = Report(config.model.path, config.algorithm.name)
    try:
        with tempfile.TemporaryDirectory() as folder:
            examine(config, report, Path(folder))
    except GerlError as error:
        report.problems.append(str(error))
    logger.info("%s", report.text(config))
    if out is not None:
        try:
            out.write_text(json.dumps(report.as_json(), indent=2, allow_nan=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"out={out}: it cannot be written ({error.strerror}); choose another file") from None
    if report.problems:
        raise TrainingError(f"this configuration cannot train: {len(report.problems)} problem(s), listed above")
    return report


def examine(config: Config, report: Report, folder: Path) -> None:
    """Fill `report`; made-up pictures lie in `folder`. Raises `GerlError` for what makes it impossible to go on."""
    machines = Cluster(config.cluster)  # not entered: nothing is started
    report.device, report.workers = machines.device, machines.num_workers
    prompts = read_prompts(config, report)
    total_updates = config.trainer.steps * config.actor.updates_per_step
    worker = HybridWorker(config, 0, machines.worker_device(0), machines.threads, total_updates)
    load(worker, report)
    bench = Bench(worker, max(prompts, key=lambda p: len(p.text), default=Prompt(0, TEXT)))
    runs = [first_run(bench, bool(prompts), folder, report)]
    runs += further_runs(bench, runs[0], report)
    report.run = runs[1]
    if config.algorithm.scores_steps and config.algorithm.cfg != "off":
        report.probe = bench.probe(report.run.drawn)
    judge_run(report, bench.trained_steps)
    project(bench, prompts, runs, report)


def read_prompts(config: Config, report: Report) -> list[Prompt]:
    """The prompts of `data.train`, none if there is no such file; raises `DataError` for one that cannot be used."""
    source = config.data.train
    try:
        dataset.resolve(source)
    except DataError as error:
        report.notes.append(f"data.train={source}: {error}; here the prompt is made up")
        return []
    try:
        prompts = dataset.load_prompts(source, config.data.prompt_key)
    except DataError as error:
        raise DataError(f"data.train={source}: {error}") from None
    report.prompts = len(prompts)
    report.steps_per_epoch = prompt_schedule(config, len(prompts)).steps_per_epoch
    return prompts


def load(worker: HybridWorker, report: Report) -> None:
    """Load the pipeline, and say what it consists of."""
    config = worker.config
    logger.info("loading %s", config.model.path)
    info, usage = attempt("loading", 0, worker.device, worker.setup)
    for sentence in info.notes:
        logger.info("%s", sentence)
    report.load_seconds, report.load_peak = usage.seconds, usage.peak
    pipe = worker.policy.pipe
    kind = type(pipe.scheduler).mro()[1 if isinstance(pipe.scheduler, SameSigmas) else 0].__name__
    own = diffusers.DiffusionPipeline.load_config(resolve(config.model.path)).get("scheduler", [None])[-1]
    report.pipeline, report.scheduler = type(pipe).__name__, kind
    report.components = components(pipe.components, worker.policy.lora)
    if own is not None and own != kind:
        report.own_scheduler = own
        report.warnings.append(
            f"training draws with {kind} in place of the pipeline's {own}, which has no transition kernel: images "
            f"that {own} draws after training may differ from those that validation shows"
        )
    if config.algorithm.scores_steps:
        report.clip = min(bounds) if (bounds := config.algorithm.clip_range) else None
        report.max_ratio_deviation = ratio_limit(config.actor, info.half_precision)


def attempt(phase: str, size: int, device: str, work: Callable[[], T]) -> tuple[T, Usage]:
    """`measured`, but `TooLarge` where the GPU's memory does not hold it."""
    try:
        return measured(device, work)
    except torch.OutOfMemoryError:
        pass  # what is raised below must not hold on to it: its traceback keeps the tensors
    release(device)
    raise TooLarge(phase, size)


class Bench:
    """Micro-batches of several sizes on one worker, all of one prompt."""

    def __init__(self, worker: HybridWorker, prompt: Prompt) -> None:
        self.worker, self.prompt = worker, prompt
        self.trained_steps: tuple[int, ...] = ()  # of the latest run

    @property
    def config(self) -> Config:
        """The run's."""
        return self.worker.config

    @property
    def smallest(self) -> int:
        """Size of the smallest micro-batch that the algorithm can do with."""
        return self.config.rollout.n if self.config.algorithm.whole_groups else 1

    def task(self, algorithm: Algorithm) -> RolloutTask:
        """The largest micro-batch that `algorithm` plans of the prompt's copies."""
        size, n = algorithm.config.rollout.micro_batch_size, algorithm.config.rollout.n
        # pictures of several prompts are never in one micro-batch
        copies = 1 if pictures_of(self.prompt) else -(-size // n)
        prompts = [replace(self.prompt, id=i) for i in range(copies)]
        return max(
            algorithm.plan(plan_samples(algorithm.config, prompts, 1, 0)), key=lambda task: rows_of(task.segments)
        )

    def run(self, rollout: int, actor: int) -> Run:
        """Draw a micro-batch of `rollout` and train on it in parts of at most `actor` images."""
        worker = self.worker
        algorithm = worker.algorithm = worker.actor.algorithm = build_algorithm(sized(self.config, rollout, actor))
        task = self.task(algorithm)
        credit = torch.ones(len(task.samples), self.config.sampling.num_inference_steps)
        credit[1::2] = -1.0
        trained = [segment for segment in task.segments if segment.trained]
        self.trained_steps = tuple(sorted({k for segment in trained for k in segment.trained}))
        drawn, parts = rows_of(task.segments), min(actor, rows_of(trained))
        logger.info("%d images: rollout in micro-batches of %d, update of %d", len(task.samples), drawn, parts)
        try:
            images, rolled = attempt("rollout", drawn, worker.device, lambda: drawing(worker, task))
            held = worker.drawn[task.id].nbytes
            pairs = count_pairs([(task, credit)])
            stats, updated = attempt("update", parts, worker.device, lambda: update(worker, task, credit, pairs))
            gradients = {name: count_gradients(worker.policy.lora, name) for name in worker.policy.denoisers}
            result, stepped = attempt("optimizer step", parts, worker.device, worker.step)
        finally:
            worker.forget()
        return Run(
            len(task.samples),
            drawn,
            parts,
            rolled,
            updated,
            stepped.seconds,
            held,
            stats.ratio_deviation,
            result.applied,
            gradients,
            "video" if images.pixels.ndim == 5 else "image",
        )

    def probe(self, rollout: int) -> SamplingProbe:
        """What the trainer measures before it starts, on a micro-batch of `rollout`."""
        algorithm = build_algorithm(sized(self.config, rollout, rollout))
        prompts = [replace(self.prompt, id=i) for i in range(-(-rollout // self.config.rollout.n))]
        task = Algorithm.plan(algorithm, plan_samples(algorithm.config, prompts, 1, 0))[0]
        logger.info("%d images: numerical noise of the ratio", len(task.samples))
        return attempt("rollout", rollout, self.worker.device, lambda: self.worker.probe(task))[0]


def drawing(worker: HybridWorker, task: RolloutTask) -> Images:
    """The images of `task`; raises `CallRefused` for errors of the pipeline."""
    try:
        return worker.generate(task)
    except torch.OutOfMemoryError:
        raise
    except REFUSALS as error:
        said = " ".join(str(error).split())
        raise CallRefused(
            f"{type(worker.policy.pipe).__name__} does not draw with these arguments ({type(error).__name__}: {said}): "
            "correct sampling.height, width, guidance_scale or sampling.call"
        ) from error


def update(worker: HybridWorker, task: RolloutTask, credit: torch.Tensor, pairs: int) -> UpdateStats:
    """What a worker does with a task that was drawn, up to the optimizer step."""
    algorithm = worker.config.algorithm
    if algorithm.subtracts_kl and algorithm.kl_coef > 0:
        worker.kl_to_base(task.id)
    return worker.accumulate({task.id: credit}, pairs)


def first_run(bench: Bench, from_file: bool, folder: Path, report: Report) -> Run:
    """The smallest micro-batch, with made-up pictures in `folder` where the pipeline does not draw without.

    An argument of a pipeline may be needed although it has a default, so it is tried. Where a file of prompts with
    pictures is still to come, they are made up at once.
    """
    config, prompt, pipe = bench.config, bench.prompt, bench.worker.policy.pipe
    accepted = inspect.signature(type(pipe).__call__).parameters
    lacking = [name for name in COLUMNS if name in accepted and not prompt.metadata.get(name)]
    needed = [name for name in lacking if accepted[name].default is inspect.Parameter.empty]
    if not from_file and Path(config.data.train).suffix in TABLES:
        needed = lacking
    refused: CallRefused | None = None
    for names in [needed] if needed == lacking else [needed, lacking]:
        bench.prompt = with_pictures(prompt, names, folder, config)
        try:
            first = bench.run(bench.smallest, min(bench.smallest, config.actor.micro_batch_size or bench.smallest))
        except CallRefused as error:
            refused = refused or error
            continue
        if names and from_file:
            report.problems.append(
                f"data.train={config.data.train}: {report.pipeline} needs {' and '.join(names)}, but its rows have no "
                "such column: add it, with the paths of pictures (here they are made up)"
            )
        elif names:
            report.notes.append(f"the pictures for {' and '.join(names)} are made up")
        return first
    assert refused is not None
    raise refused


def with_pictures(prompt: Prompt, names: Sequence[str], folder: Path, config: Config) -> Prompt:
    """`prompt` with a grey picture for each of `names`, a white one for a mask, as large as the images to draw."""
    metadata = dict(prompt.metadata)
    for name in names:
        colour = (255, 255, 255) if "mask" in name else (127, 127, 127)
        path = folder / f"{name}.png"
        Image.new("RGB", (config.sampling.width or SIDE, config.sampling.height or SIDE), colour).save(path)
        metadata[name] = str(path)
    return replace(prompt, metadata=metadata)


def further_runs(bench: Bench, first: Run, report: Report) -> list[Run]:
    """The configured micro-batch, or the largest half of it that fits, and another where it is no larger than `first`.

    Memory as a function of the size needs two sizes.
    """
    config, worker = bench.config, bench.worker
    configured = config.rollout.micro_batch_size, config.actor.micro_batch_size or config.rollout.micro_batch_size
    rollout, actor = configured
    while True:
        try:
            run = bench.run(rollout, actor)
            break
        except TooLarge as error:
            if (rollout if error.phase == "rollout" else actor) <= bench.smallest:
                raise
            rollout = max(bench.smallest, rollout // 2) if error.phase == "rollout" else rollout
            actor = min(rollout, actor if error.phase == "rollout" else max(bench.smallest, actor // 2))
    if (rollout, actor) != configured:
        report.problems.append(
            f"the GPU's memory does not hold rollout.micro_batch_size={configured[0]} with actor.micro_batch_size="
            f"{configured[1]}: {rollout} and {actor} do, with which the numbers above were measured"
        )
    if config.model.compile or worker.device.startswith("cuda"):
        run = bench.run(rollout, actor)  # the first time kernels are chosen or compiled
    larger = 2 * actor if run.trained == first.trained else actor
    drawn = max(larger, 2 * rollout if run.drawn == first.drawn else rollout)
    room, peak = capacity(worker.device), max(run.rollout.peak or 0, run.update.peak or 0)
    # a GPU says when its memory is full, a CPU's process is killed
    if (drawn, larger) == (rollout, actor) or (worker.device == "cpu" and (room is None or room < 2 * peak)):
        return [run]
    try:
        return [run, bench.run(drawn, larger)]
    except TooLarge:
        return [run]


def project(bench: Bench, prompts: Sequence[Prompt], runs: Sequence[Run], report: Report) -> None:
    """What a trainer step takes, and whether there is so much."""
    config, run, workers = bench.config, report.run, report.workers
    assert run is not None and workers is not None
    own = {name: name for name in COLUMNS if bench.prompt.metadata.get(name)}
    made_up = [Prompt(i, TEXT, {name: f"{i}" for name in own}) for i in range(config.rollout.prompts_per_step)]
    chosen = plan_prompts(config, prompts, 1) if prompts else made_up
    algorithm = build_algorithm(config)
    tasks = algorithm.plan(plan_samples(config, chosen, 1, 0))
    report.seconds = forecast_seconds(config, tasks, workers, run, trained_share(algorithm, tasks))
    images = report.seconds.images_per_worker
    largest = min(images, config.rollout.n) if own else images
    sizes = range(bench.smallest, largest + 1, bench.smallest)
    room = capacity(bench.worker.device)
    if room is not None and bench.worker.device == "cpu":
        room //= workers
    report.memory = forecast_memory(config, runs, run, images, sizes, room)
    judge_memory(report, config)
    report.warnings += judge_batches(config, tasks, workers, config.rollout.n if own else report.seconds.images)
    if (more := config.algorithm.dynamic_sampling) > 0:
        report.notes.append(f"algorithm.dynamic_sampling={more} may draw {more + 1} times as many images in a step")
    if report.device == "cuda" and any(config.reward.gpu_shares):
        report.notes.append("the memory of scorers on the same GPU comes on top")


def trained_share(algorithm: Algorithm, tasks: Sequence[RolloutTask]) -> float:
    """The share of images that rewards which all differ give a credit to; others the update leaves out."""
    samples = [sample for task in tasks for sample in task.samples]
    if algorithm.needs_all_samples:
        return 1.0
    totals = torch.rand(len(samples), generator=torch.Generator().manual_seed(0))
    credit = algorithm.credit(Rewards(samples, totals, totals[:, None], torch.ones(1)))
    return float((credit.nan_to_num() != 0).any(1).float().mean())
