"""Examine a run in the time of a few steps: sample and train one prompt as a worker does, with synthetic rewards."""

import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from gerl.algorithms import Algorithm, Rewards, build_algorithm
from gerl.algorithms.planning import plan_prompts, plan_samples, prompt_schedule
from gerl.algorithms.signal_checks import nearer_bound, ratio_limit
from gerl.cluster import Cluster
from gerl.config import Config, sources
from gerl.data import tables
from gerl.data.sources import check_mixture, load_split
from gerl.errors import DataError, GerlError, TrainingError
from gerl.model.loading import check_model, replaced_scheduler
from gerl.model.schedulers import SUBSTITUTES
from gerl.preflight import findings
from gerl.preflight.bench import TEXT, Bench, attempt, first_run, further_runs
from gerl.preflight.findings import Report, Run
from gerl.preflight.replay_checks import judge_faithful
from gerl.protocol import Prompt, RolloutTask
from gerl.utils.condition_images import COLUMNS
from gerl.workers.worker import PolicyWorker

logger = logging.getLogger("gerl")


COMPARED = 4  # images of the micro-batch that compares a rollout with the plain pipeline


def run(config: Config, out: Path | None = None) -> Report:
    """Examine a run, log the report and write it to `out`. Raises `TrainingError` if the run cannot train."""
    report = Report(config.model.path, config.algorithm.name)
    try:
        with tempfile.TemporaryDirectory() as folder:
            examine(config, report, Path(folder))
    except GerlError as error:
        report.problems.append(str(error))
    logger.info("%s", report.text(config))
    if out is not None:
        findings.write_json(out, report.as_json())
    if report.problems:
        first, *further = report.problems
        problem = f"{len(report.problems)} problems, listed above" if further else first
        raise TrainingError(f"this configuration cannot train: {problem}")
    return report


def examine(config: Config, report: Report, folder: Path) -> None:
    """Fill `report`, with synthetic images in `folder`. Raises `GerlError` for a problem that ends the preflight."""
    machines = Cluster(config.cluster)  # not entered, so nothing is started
    report.device, report.workers = machines.device, machines.num_workers
    prompts = read_prompts(config, report)
    total_updates = config.trainer.steps * config.actor.updates
    worker = PolicyWorker(config, 0, machines.worker_device(0), machines.threads, total_updates)
    half = load(worker, report)
    bench = Bench(worker, max(prompts, key=lambda p: len(p.text), default=Prompt(0, TEXT)))
    runs = [first_run(bench, bool(prompts), folder, report)]
    runs += further_runs(bench, runs[0], report)
    report.run = runs[1]
    if config.algorithm.needs.ratio and config.algorithm.cfg != "off":
        report.probe = bench.probe(report.run.sampled)
        report.clip = nearer_bound(config.algorithm, report.probe)
    if config.actor.check_gradient:
        try:
            report.gradient = bench.check_gradient(report.run, half)
        except TrainingError as error:
            report.problems.append(str(error))
    report.stock_difference, report.parts_difference = bench.compare(COMPARED)
    judge_faithful(report, config, half)
    findings.judge_run(report, bench.trained_steps)
    project(bench, prompts, runs, report)


def read_prompts(config: Config, report: Report) -> list[Prompt]:
    """Return the prompts of `data.train`, none if a file is missing. Raises `DataError` if a file cannot be used."""
    if config.data.train is None:
        report.notes.append("data.train is not set; using a synthetic prompt here")
        return []
    for source in sources(config.data.train, "data.train"):
        try:
            if not source.on_hub:
                tables.resolve(source.path)
        except DataError as error:
            report.notes.append(f"data.train={source.path}: {error}; using a synthetic prompt here")
            return []
    prompts = load_split(config, "data.train", config.data.train)
    check_mixture(config, prompts)
    report.prompts = len(prompts)
    report.steps_per_epoch = prompt_schedule(config, prompts).steps_per_epoch
    return prompts


def load(worker: PolicyWorker, report: Report) -> bool:
    """Load the pipeline and report its components. Returns whether the base weights are in half precision."""
    config = worker.config
    check_model(config.model, config.sampling, config.cluster.context)
    logger.info("loading %s", config.model.path)
    info, usage = attempt("loading", 0, worker.device, worker.setup)
    for sentence in info.notes:
        logger.info("%s", sentence)
    report.warnings += info.warnings
    report.load_seconds, report.load_peak = usage.seconds, usage.peak
    pipe = worker.policy.pipe
    kind = type(pipe.scheduler).mro()[1 if isinstance(pipe.scheduler, SUBSTITUTES) else 0].__name__
    scheduler = replaced_scheduler(pipe, config.model)
    report.pipeline, report.scheduler = type(pipe).__name__, kind
    report.components = findings.components(pipe.components, worker.policy.trained)
    if scheduler is not None and scheduler != kind:
        report.own_scheduler = scheduler
        report.warnings.append(
            f"training samples with {kind} instead of the pipeline's {scheduler}, which has no transition kernel: "
            f"images that {scheduler} samples after training may differ from those in validation"
        )
    if config.algorithm.needs.ratio:
        report.max_ratio_deviation = ratio_limit(config.actor, info.half_precision)
    return info.half_precision


def project(bench: Bench, prompts: Sequence[Prompt], runs: Sequence[Run], report: Report) -> None:
    """Forecast time and memory of a trainer step, and report problems if the memory is not sufficient."""
    config, run, workers = bench.config, report.run, report.workers
    assert run is not None and workers is not None
    pictured = {name: name for name in COLUMNS if bench.prompt.metadata.get(name)}
    made_up = [Prompt(i, TEXT, {name: f"{i}" for name in pictured}) for i in range(config.rollout.prompts_per_step)]
    chosen = plan_prompts(prompt_schedule(config, prompts), prompts, 1) if prompts else made_up
    algorithm = build_algorithm(config)
    tasks = algorithm.plan(plan_samples(config, chosen, 1, 0))
    report.seconds = findings.forecast_seconds(config, tasks, workers, run, trained_share(algorithm, tasks))
    images = report.seconds.images_per_worker
    largest = min(images, config.rollout.n) if pictured else images
    sizes = range(1, largest + 1)
    room = findings.capacity(bench.worker.device)
    if room is not None and bench.worker.device == "cpu":
        room //= workers
    report.memory = findings.forecast_memory(config, runs, run, images, sizes, room)
    findings.judge_memory(report, config)
    report.warnings += findings.judge_batches(
        config, tasks, workers, config.rollout.n if pictured else report.seconds.images
    )
    if (more := config.algorithm.dynamic_sampling) > 0:
        report.notes.append(f"algorithm.dynamic_sampling={more} may sample {more + 1} times as many images in a step")
    if report.device == "cuda" and any(config.reward.gpu_shares):
        report.notes.append("the memory of scorers on the same GPU is not included")


def trained_share(algorithm: Algorithm, tasks: Sequence[RolloutTask]) -> float:
    """Return the share of images with nonzero credit if all rewards differ; the update skips the others."""
    samples = [sample for task in tasks for sample in task.samples]
    if algorithm.needs_all_samples:
        return 1.0
    totals = torch.rand(len(samples), generator=torch.Generator().manual_seed(0))
    credit = algorithm.credit(Rewards(samples, totals, totals[:, None], torch.ones(1)))
    return float((credit.nan_to_num() != 0).any(1).float().mean())
