"""Turn the credit of a step into optimizer steps, the same on all workers."""

import hashlib
import json
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from gerl.algorithms import Algorithm, KLWeight, count_pairs
from gerl.algorithms.core_algos import SPREAD
from gerl.algorithms.signal_checks import NOT_FINITE, nearer_bound, probe_warnings, ratio_limit, ratio_problem
from gerl.config import Config
from gerl.errors import TrainingError
from gerl.protocol import RolloutTask, StepResult, UpdateStats
from gerl.run.checkpoint import RunState
from gerl.run.health import ABSURD_WEIGHT
from gerl.trainer.step import Metrics, Step
from gerl.utils.seeding import seed_everything
from gerl.utils.tensors import PackedTensors
from gerl.workers.calibration import calibrate
from gerl.workers.gradient_check import LARGEST, GradientComparison, check_gradient, compare_gradient, worst

if TYPE_CHECKING:
    from gerl.workers.fleet import LocalFleet

logger = logging.getLogger(__name__)
Accumulated = Callable[[Step, PackedTensors, int, KLWeight], UpdateStats | None]
MAX_NONFINITE = 3  # skipped updates (gradient not finite) after which the run stops


class Update:
    """The optimizer steps of a trainer step, counted in the run's `state`."""

    def __init__(
        self, config: Config, algorithm: Algorithm, fleet: "LocalFleet", state: RunState, half_precision: bool
    ) -> None:
        self.config, self.algorithm, self.fleet, self.state = config, algorithm, fleet, state
        self.ratio_limit, self.half_precision = ratio_limit(config.actor, half_precision), half_precision
        self.settings, self.compares_gradient = gradient_settings(config), config.actor.check_gradient
        self.clip_range: tuple[float, float] | None = None  # of the ratio, for the latents of this model
        self.prefix = ""  # of messages: the role, if it is another than the run's own
        self.said_spread = False
        self.noted: set[str] = set()  # sentences of workers that are already logged
        self.resets_reference: Callable[[Step], bool] = lambda step: False  # called before the last optimizer step
        self.accumulated: Accumulated = lambda step, credit, pairs, kl: None  # called before the first gradient

    def calibrate(self, task: RolloutTask, ranks: int = 1) -> None:
        """Measure the ratio's numerical noise on `task` with `ranks` in lockstep, and warn."""
        config = self.config.algorithm
        probes = [self.fleet.trainers.submit(rank, calibrate, task) for rank in range(ranks)]
        probe = probes[0].result()
        if not math.isfinite(probe.log_ratio_noise):
            raise TrainingError(f"{self.prefix}the model computes numbers that are {NOT_FINITE}")
        logger.info("%son policy |log ratio| is at most %.1e (99th percentile)", self.prefix, probe.log_ratio_noise)
        self.clip_range = config.clip_range(probe.dimensions)
        if self.clip_range is not None:
            logger.info(
                "%sthe ratio is clipped %.3g below and %.3g above 1: algorithm.clip_low and clip_high for latents of "
                "%s dimensions",
                *(self.prefix, *self.clip_range, f"{probe.dimensions:,}"),
            )
        for sentence in probe_warnings(probe, nearer_bound(config, probe)):
            logger.warning("%s%s", self.prefix, sentence)

    def run(self, step: Step) -> Metrics:
        """Train on the credit of `step`; raises `TrainingError` for a first ratio other than 1 or NaN gradients."""
        state, counts = self.state, (self.state.policy_version, self.state.nonfinite, self.state.checked)
        try:
            return self._run(step)
        except BaseException:
            state.policy_version, state.nonfinite, state.checked = counts  # the record is that of the finished step
            raise

    def check_gradient(self, credit: PackedTensors, pairs: int, kl: KLWeight) -> Metrics:
        """Compare the gradient of a micro-batch with the plain one, as `check_gradient` does; log and return both."""

        def compare(kept: Sequence[str], reorder: bool) -> GradientComparison | None:
            return worst(self.fleet.on_credit(compare_gradient, credit, pairs, kl, kept=kept, reorder=reorder))

        checked = check_gradient(compare, LARGEST[self.half_precision])
        self.state.checked = self.settings
        if checked is None or (checked.is_zero and checked.switches):
            return {}
        logger.info("%s%s", self.prefix, checked.text)
        if not checked.switches:
            return {}
        return {"actor/gradient_cosine": checked.cosine, "actor/gradient_norm_ratio": checked.norm}

    def _run(self, step: Step) -> Metrics:
        assert step.credit is not None
        config, credit, fleet = self.config, step.credit, self.fleet
        tasks, images = split_rollout_and_dataset(step.tasks, self.algorithm)
        all_samples = self.algorithm.needs_all_samples
        seed_everything("update", config.trainer.seed, self.state.step)
        by_task = split_by_task(tasks, credit)
        per_sample = None if step.kl_weight is None else PackedTensors(split_by_task(tasks, step.kl_weight))
        kl = KLWeight(self.algorithm.kl_coef, per_sample)
        stats, off_policy = UpdateStats(), UpdateStats()
        deviation, started = None, self.state.policy_version
        late = step.lag > 0 or config.rollout.quantize != "none"  # sampled with other weights than the trained ones
        parts = list(update_parts(tasks, config.actor.updates_per_step, self.algorithm.whole_groups))
        credit_of = [PackedTensors((task.id, by_task[task.id]) for task in part) for part in parts]
        # decided here for all workers, which must take the same steps
        learned = [
            n
            for n, part_credit in enumerate(credit_of)
            if has_signal(torch.cat(list(part_credit.values())), all_samples)
        ]
        learned *= config.actor.epochs
        metrics: Metrics = {}
        results: list[StepResult] = []  # of an optimizer step, by worker
        for turn, number in enumerate(learned, start=1):
            part_credit = credit_of[number]
            pairs = count_pairs([(task, part_credit[task.id]) for task in parts[number]])
            if images:
                part_credit = PackedTensors(part_credit | dataset_credit(images, pairs, credit, config))
            if self.state.checked != self.settings and self.compares_gradient:
                metrics |= self.check_gradient(part_credit, pairs, kl)
            early = self.accumulated(step, part_credit, pairs, kl) if turn == 1 else None
            new = fleet.accumulate(part_credit, pairs, kl) if early is None else early
            stats += new
            if number == 0 and turn == 1 and not late and new.ratio_deviation is not None:
                deviation = new.ratio_deviation
                self.check_ratio(deviation)
            if late or self.state.policy_version > started:
                off_policy += new
            last = turn == len(learned)
            step.stats = stats
            results = fleet.step(self.state.step, last, last and self.resets_reference(step))
            self.count(results[0])
        if not results:
            step.stats = stats
        ends = fleet.finish_step(self.state.step + 1, results, not results and self.resets_reference(step))
        self._say([note for end in ends for note in end.notes])
        return (
            actor_metrics(stats, results[0] if results else None, deviation)
            | metrics
            | self.spread(off_policy)
            | {
                "actor/nonfinite_updates": float(self.state.nonfinite),
                "actor/policy_version": float(self.state.policy_version),
            }
            | _end_metrics(ends, len(credit))
            | ({"actor/staleness": float(step.lag)} if config.trainer.staleness else {})
        )

    def _say(self, notes: Sequence[str]) -> None:
        for note in notes:
            if note not in self.noted:  # another worker may find out the same, at this step or later
                logger.warning("%s%s", self.prefix, note)
                self.noted.add(note)

    def spread(self, stats: UpdateStats) -> Metrics:
        """Return the metrics of the updates after the first one; the first step of a run that has some logs them."""
        metrics = off_policy_metrics(stats)
        if not metrics:
            return {}
        threshold = getattr(self.config.algorithm, "kl_threshold", None)
        region = "the trust region" if threshold is None else f"algorithm.kl_threshold={threshold}"
        if self.clip_range is not None:
            region = f"the clip range of {self.clip_range[0]:.2g} below and {self.clip_range[1]:.2g} above 1"
            metrics["actor/off_policy/clip_range"] = min(self.clip_range)
        if not self.said_spread:
            self.said_spread = True
            logger.info(
                "%sin the first off-policy update |log ratio| is %.2g on average and |ratio - 1| at most %.2g: %.0f %% "
                "of the (sample, timestep) pairs are outside %s",
                *(self.prefix, metrics["actor/off_policy/log_ratio_abs"], stats.ratio_deviation),
                *(100 * metrics["actor/off_policy/outside_fraction"], region),
            )
        return metrics

    def check_ratio(self, deviation: float) -> None:
        """Raise `TrainingError` if the ratio on policy is not 1; a NaN comes with a gradient that `count` skips."""
        if deviation > self.ratio_limit:
            raise TrainingError(self.prefix + ratio_problem(deviation, self.ratio_limit))

    def count(self, result: StepResult) -> None:
        """Count an optimizer step; raises `TrainingError` if too many were skipped or the weights are not finite."""
        self.state.policy_version += result.applied
        if result.lora_max is not None and (problem := weights_problem(result.lora_max, result.lr)):
            raise TrainingError(self.prefix + problem)
        if not result.applied:
            self.state.nonfinite += 1
            skipped = self.state.nonfinite
            if not self.state.policy_version:
                raise TrainingError(f"{self.prefix}the gradient of the first update is {NOT_FINITE}")
            logger.warning("%supdate skipped: its gradient is not finite (%d so far)", self.prefix, skipped)
            if skipped > MAX_NONFINITE:
                raise TrainingError(
                    f"{self.prefix}{skipped} updates had no finite gradient: lower actor.lr, or use model.dtype=float32"
                )


def gradient_settings(config: Config) -> str:
    """Return a digest of the settings and versions that decide how a gradient is computed."""
    blocks = {name: asdict(getattr(config, name)) for name in ("model", "sampling", "algorithm", "rollout", "actor")}
    values = [config.cluster.device, torch.__version__, blocks]
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:16]


def has_signal(credit: torch.Tensor, all_samples: bool) -> bool:
    """Whether an algorithm learns from `credit`, NaN where not trained on; `all_samples`: also from a credit of 0."""
    trained = credit[~credit.isnan()]
    return bool(len(trained) if all_samples else trained.any())


def update_parts(tasks: Sequence[RolloutTask], updates: int, whole_groups: bool = False) -> list[list[RolloutTask]]:
    """Split `tasks` into `updates` nearly equal consecutive parts, one per optimizer step, without empty ones.

    `whole_groups`: tasks that share a group stay together.
    """
    units: list[list[RolloutTask]] = []
    for task in tasks:
        if whole_groups and units and units[-1][-1].samples[-1].group == task.samples[0].group:
            units[-1].append(task)
        else:
            units.append([task])
    bounds = [round(i * len(units) / updates) for i in range(updates + 1)]
    parts = [[task for unit in units[a:b] for task in unit] for a, b in pairwise(bounds)]
    return [part for part in parts if part]


def split_by_task(tasks: Sequence[RolloutTask], values: torch.Tensor) -> dict[int, torch.Tensor]:
    """Split `values` `[B, ...]` by the task of each sample."""
    return dict(zip((t.id for t in tasks), values.split([len(t.samples) for t in tasks]), strict=True))


def actor_metrics(stats: UpdateStats, result: StepResult | None, deviation: float | None) -> Metrics:
    """Return averages over the trained pairs, the last optimizer step, and the `deviation` of the on-policy ratio.

    Metrics that were not measured are left out: `result` is None if no optimizer step was tried, `deviation` if there
    is no ratio to the rollout. `step_grad_norm/K` is the norm of what the first micro-batch of each update added at
    step K (root mean square), `step_grad_share` the largest share of one step in their squares.
    """
    sums = {name: value for name, value in stats.sums.items() if name not in ("data_error", "data_pairs")}
    measured = {name: value / stats.pairs for name, value in sums.items() if name not in SPREAD}
    measured |= {name: total / count for name, (total, count) in stats.parts.items()}
    if stats.sums.get("data_pairs"):
        measured["data_error"] = stats.sums["data_error"] / stats.sums["data_pairs"]
    if "clip_fraction_low" in stats.sums:
        measured["clip_fraction"] = (stats.sums["clip_fraction_low"] + stats.sums["clip_fraction_high"]) / stats.pairs
    if deviation is not None:
        measured["ratio_deviation"] = deviation
    if result is not None:
        measured |= {"grad_norm": result.grad_norm, "lr": result.lr}
        optional = {"lora_max": result.lora_max, "grad_rms": result.grad_rms}
        measured |= {name: value for name, value in optional.items() if value is not None}
    squares = {k: total / count for k, (total, count) in stats.step_squares.items()}
    measured |= {f"step_grad_norm/{k}": math.sqrt(square) for k, square in squares.items()}
    if len(squares) > 1 and (whole := sum(squares.values())) > 0:
        measured["step_grad_share"] = max(squares.values()) / whole
    return {f"actor/{name}": value for name, value in measured.items()}


def off_policy_metrics(stats: UpdateStats) -> Metrics:
    """Return averages over the pairs of the updates after the first one; empty if they have no ratio."""
    if not stats.pairs or not stats.sums.keys() >= set(SPREAD):
        return {}
    means = {name: value / stats.pairs for name, value in stats.sums.items()}
    values = {name: means[name] for name in SPREAD}
    values["clip_fraction"] = means["clip_fraction_low"] + means["clip_fraction_high"]
    return {f"actor/off_policy/{name}": value for name, value in values.items()}


def split_rollout_and_dataset(
    tasks: Sequence[RolloutTask], algorithm: Algorithm
) -> tuple[list[RolloutTask], list[RolloutTask]]:
    """Split tasks into those of the rollout and those of dataset images (data.regularise)."""
    sampled, images = list[RolloutTask](), list[RolloutTask]()
    for task in tasks:
        (sampled if algorithm.of(task.samples) is algorithm else images).append(task)
    return sampled, images


def dataset_credit(
    tasks: Sequence[RolloutTask], pairs: int, like: torch.Tensor, config: Config
) -> dict[int, torch.Tensor]:
    """Return the credit of dataset images by task id: `data_coef` times their mean, in an update of `pairs` pairs."""
    ones = {task.id: like.new_ones(len(task.samples), like.shape[1]) for task in tasks}
    added = count_pairs([(task, ones[task.id]) for task in tasks])
    return {number: config.algorithm.data_coef * pairs / added * rows for number, rows in ones.items()}


def _end_metrics(ends: Sequence[StepResult], images: int) -> Metrics:
    """Return the share of blank images among `images`, the denoiser's evaluations and the peak GPU memory of a step."""
    memory = [end.memory_gb for end in ends if end.memory_gb is not None]
    metrics = {
        "health/blank_fraction": sum(end.blank for end in ends) / images,
        "evaluations/images": float(images),
        "evaluations/forward": float(sum(end.forward for end in ends)),
        "evaluations/backward": float(sum(end.backward for end in ends)),
    }
    return metrics | ({"gpu/memory_gb": max(memory)} if memory else {})


def weights_problem(largest: float, lr: float) -> str | None:
    """Describe a largest LoRA weight that is not finite or absurdly large; None for any other."""
    if largest <= ABSURD_WEIGHT:  # false for NaN
        return None
    return (
        f"the largest weight of the LoRA is {largest:.3g} after an optimizer step at learning rate {lr:.3g}, above "
        f"{ABSURD_WEIGHT:g}, while typical ones are below 1: this step is discarded; lower actor.lr"
    )
