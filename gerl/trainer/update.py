"""Train: the optimizer steps of a trainer step, the same on all workers."""

import logging
import math
from collections.abc import Mapping, Sequence

import torch

from gerl.algorithms import Algorithm, Pull, count_pairs
from gerl.algorithms.core_algos import SPREAD
from gerl.algorithms.planning import update_parts
from gerl.algorithms.pooling import pooled_sum
from gerl.algorithms.signal_checks import ratio_limit, ratio_problem
from gerl.cluster import Pending, WorkerGroup
from gerl.config import Config
from gerl.errors import TrainingError
from gerl.protocol import RolloutTask, StepEnd, StepResult, UpdateStats
from gerl.run.health import weights_problem
from gerl.run.state import RunState
from gerl.trainer.credit import Metrics
from gerl.utils.seeding import seed_everything
from gerl.workers.hybrid import HybridWorker
from gerl.workers.values import Rows

logger = logging.getLogger(__name__)
MAX_NONFINITE = 3  # updates without a finite gradient that are skipped before the run stops


class Update:
    """Turns credit into optimizer steps, and counts them in the run's `state`."""

    def __init__(
        self,
        config: Config,
        algorithm: Algorithm,
        workers: WorkerGroup[HybridWorker],
        state: RunState,
        half_precision: bool,
    ) -> None:
        self.config, self.algorithm, self.workers, self.state = config, algorithm, workers, state
        self.ratio_limit = ratio_limit(config.actor, half_precision)
        self.clip_range: tuple[float, float] | None = None  # of the ratio, for the model's latents
        self.said_spread = False
        self.noted: set[str] = set()  # sentences of workers that the log has

    def run(
        self,
        tasks: Sequence[RolloutTask],
        credit: torch.Tensor,
        sets: Sequence[Sequence[int]] | None = None,
        lag: int = 0,
        others: Sequence[Pending[StepEnd]] = (),
        gate: torch.Tensor | None = None,
    ) -> Metrics:
        """Take the step's optimizer steps for the `credit` `[B, T]` of its samples; returns their metrics.

        `sets`: ids of the tasks that the ranks of a worker drew at the same time, where they are in lockstep. `lag`:
        steps that were finished since they were drawn; with none the first update is on policy, where the ratio must
        be 1. `others`: what workers that only draw say at its end. `gate`: factors `[B]` of the samples' distances to
        the reference. Raises `TrainingError` if the ratio is not 1, or
        if too many gradients are not finite.
        """
        state, counts = self.state, (self.state.policy_version, self.state.nonfinite)
        try:
            return self._run(tasks, credit, sets, lag, others, gate)
        except BaseException:
            state.policy_version, state.nonfinite = counts  # the record is that of the finished step
            raise

    def _run(
        self,
        tasks: Sequence[RolloutTask],
        credit: torch.Tensor,
        sets: Sequence[Sequence[int]] | None,
        lag: int,
        others: Sequence[Pending[StepEnd]],
        gate: torch.Tensor | None,
    ) -> Metrics:
        seed_everything("update", self.config.trainer.seed, self.state.step)
        tasks, images = drawn_and_given(tasks, self.algorithm)
        by_task = by_id(tasks, credit)
        pull = Pull(self.algorithm.kl_coef, None if gate is None else Rows(by_id(tasks, gate)))
        stats, off_policy = UpdateStats(), UpdateStats()
        deviation, started, resets = None, self.state.policy_version, False
        late = lag > 0 or self.config.rollout.quantize != "none"  # other weights drew than those that are trained
        whole_groups = self.config.algorithm.whole_groups
        parts = list(update_parts(tasks, self.config.actor.updates_per_step, whole_groups))
        given_to = [Rows((task.id, by_task[task.id]) for task in part) for part in parts]
        # decided here for all workers, which must take the same steps
        learned = [n for n, given in enumerate(given_to) if self.has_signal(torch.cat(list(given.values())))]
        learned *= self.config.actor.epochs
        results: list[StepResult] = []  # of an optimizer step, by worker
        for turn, number in enumerate(learned, start=1):
            part, given = parts[number], given_to[number]
            pairs = count_pairs((task, given[task.id]) for task in part)
            given = Rows(given | image_credit(images, pairs, credit, self.config))
            at_once = _those_of(given, sets)
            pools = self.algorithm.pools
            pooled = pooled_sum(self.workers.run(HybridWorker.pool, given, at_once, pull)) if pools else None
            new = sum(self.workers.run(HybridWorker.accumulate, given, pairs, pooled, at_once, pull), UpdateStats())
            stats += new
            if number == 0 and turn == 1 and not late and new.ratio_deviation is not None:
                deviation = new.ratio_deviation
                self.check_ratio(deviation)
            if late or self.state.policy_version > started:
                off_policy += new
            together = len(self.workers) > 1 and self.workers.remote
            if len(self.workers) > 1 and not together:  # in this process there is no collective
                total = torch.stack(self.workers.run(HybridWorker.flat_gradient)).sum(0)
                self.workers.run(HybridWorker.set_flat_gradient, total)
            last = turn == len(learned)
            resets = last and self.due_reset(stats)
            results = self.workers.run(HybridWorker.step, self.state.step, together, last, resets)
            self.count(results[0])
        if not results:
            resets = self.due_reset(stats)
        ends = self._end(results, resets) + [call.result() for call in others]
        self._say([note for end in ends for note in end.notes])
        return (
            actor_metrics(stats, results[0] if results else None, deviation)
            | self.spread(off_policy)
            | {
                "actor/nonfinite_updates": float(self.state.nonfinite),
                "actor/policy_version": float(self.state.policy_version),
            }
            | _end_metrics(ends, len(credit))
            | ({"actor/staleness": float(lag)} if self.config.trainer.staleness else {})
            | ({"actor/reference_step": float(self.algorithm.reference_step)} if self.moves_reference else {})
        )

    def _end(self, results: Sequence[StepResult], resets: bool) -> list[StepEnd]:
        """End the step on all workers, unless their last optimizer step did, whose `results` these are."""
        if resets:
            self.algorithm.reference_step = self.state.step + 1
        if not results:
            return self.workers.run(HybridWorker.finish_step, self.state.step + 1, resets)
        return [result.end for result in results if result.end is not None]

    def _say(self, notes: Sequence[str]) -> None:
        for note in notes:
            if note not in self.noted:  # another worker may find out the same, at this step or later
                logger.warning("%s", note)
                self.noted.add(note)

    @property
    def moves_reference(self) -> bool:
        """Whether other weights take the base model's place in the KL."""
        return self.config.algorithm.moves_reference

    def due_reset(self, stats: UpdateStats) -> bool:
        """Whether the weights after this step are those that the KL is measured from next."""
        kl = stats.sums["kl"] / stats.pairs if stats.pairs and "kl" in stats.sums else None
        return self.moves_reference and self.algorithm.due_reset(self.state.step + 1, kl)

    def spread(self, stats: UpdateStats) -> Metrics:
        """The metrics of the updates after a step's first one, and in a run's first step with any a line of the log."""
        metrics = off_policy_metrics(stats)
        if not metrics:
            return {}
        region = f"algorithm.kl_threshold={getattr(self.config.algorithm, 'kl_threshold', None)}"
        if self.clip_range is not None:
            region = f"the clip range of {self.clip_range[0]:.2g} below and {self.clip_range[1]:.2g} above 1"
            metrics["actor/off_policy/clip_range"] = min(self.clip_range)
        if not self.said_spread:
            self.said_spread = True
            logger.info(
                "in the first off-policy update |log ratio| is %.2g on average and |ratio - 1| at most %.2g: %.0f %% "
                "of the (sample, timestep) pairs are outside %s",
                *(metrics["actor/off_policy/log_ratio_abs"], stats.ratio_deviation),
                *(100 * metrics["actor/off_policy/outside_fraction"], region),
            )
        return metrics

    def has_signal(self, credit: torch.Tensor) -> bool:
        """Whether there is anything to learn from `credit`, NaN where a sample is not trained on."""
        known = credit[~credit.isnan()]
        return bool(len(known) if self.algorithm.needs_all_samples else known.any())

    def check_ratio(self, deviation: float) -> None:
        """Raise `TrainingError` if the ratio on policy is not 1; a NaN comes with a gradient that `count` skips."""
        if deviation > self.ratio_limit:
            raise TrainingError(ratio_problem(deviation, self.ratio_limit))

    def count(self, result: StepResult) -> None:
        """Count an optimizer step; raises `TrainingError` if too many were skipped, or if it broke the weights."""
        self.state.policy_version += result.applied
        if result.lora_max is not None and (problem := weights_problem(result.lora_max, result.lr)):
            raise TrainingError(problem)
        if not result.applied:
            self.state.nonfinite += 1
            logger.warning("update skipped: its gradient is not finite (%d so far)", self.state.nonfinite)
            if self.state.nonfinite > MAX_NONFINITE:
                raise TrainingError(
                    f"{self.state.nonfinite} updates had no finite gradient: lower actor.lr, or use model.dtype=float32"
                )


def by_id(tasks: Sequence[RolloutTask], values: torch.Tensor) -> dict[int, torch.Tensor]:
    """The rows of `values` `[B, ...]` by the task whose samples they are of."""
    return dict(zip((t.id for t in tasks), values.split([len(t.samples) for t in tasks]), strict=True))


def actor_metrics(stats: UpdateStats, result: StepResult | None, deviation: float | None) -> Metrics:
    """Averages over the trained pairs, the last optimizer step, and the `deviation` of the ratio on policy.

    What was not measured is left out: `result` is None if no optimizer step was tried, `deviation` if there is no ratio
    to the rollout. `step_grad_norm/K` is the norm of what the first micro-batch of each update added at step K (root
    mean square), `step_grad_share` the largest share of one step in their squares.
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
        known = {"lora_max": result.lora_max, "grad_rms": result.grad_rms}
        measured |= {name: value for name, value in known.items() if value is not None}
    squares = {k: total / count for k, (total, count) in stats.step_squares.items()}
    measured |= {f"step_grad_norm/{k}": math.sqrt(square) for k, square in squares.items()}
    if len(squares) > 1 and (whole := sum(squares.values())) > 0:
        measured["step_grad_share"] = max(squares.values()) / whole
    return {f"actor/{name}": value for name, value in measured.items()}


def off_policy_metrics(stats: UpdateStats) -> Metrics:
    """Averages over the pairs of the updates after a step's first one; none where no ratio was measured in them."""
    if not stats.pairs or not stats.sums.keys() >= set(SPREAD):
        return {}
    means = {name: value / stats.pairs for name, value in stats.sums.items()}
    values = {name: means[name] for name in SPREAD}
    values["clip_fraction"] = means["clip_fraction_low"] + means["clip_fraction_high"]
    return {f"actor/off_policy/{name}": value for name, value in values.items()}


def drawn_and_given(tasks: Sequence[RolloutTask], algorithm: Algorithm) -> tuple[list[RolloutTask], list[RolloutTask]]:
    """The tasks that the algorithm has a credit for, and those of images that are imitated beside it."""
    drawn = [task for task in tasks if algorithm.of(task.samples) is algorithm]
    return drawn, [task for task in tasks if algorithm.of(task.samples) is not algorithm]


def image_credit(
    tasks: Sequence[RolloutTask], pairs: int, like: torch.Tensor, config: Config
) -> dict[int, torch.Tensor]:
    """The credit of images that are imitated beside an update of `pairs` pairs, by task id.

    An update divides by its pairs. So that what the images add is `algorithm.data_coef` times the mean over their own
    pairs, however many there are, their credit is that times the ratio of the two numbers.
    """
    ones = {task.id: like.new_ones(len(task.samples), like.shape[1]) for task in tasks}
    own = count_pairs((task, ones[task.id]) for task in tasks)
    return {number: config.algorithm.data_coef * pairs / own * rows for number, rows in ones.items()}


def _those_of(given: Mapping[int, torch.Tensor], sets: Sequence[Sequence[int]] | None) -> list[list[int]] | None:
    """The sets of tasks that have some of `given`, where there are sets."""
    return None if sets is None else [list(members) for members in sets if not given.keys().isdisjoint(members)]


def _end_metrics(ends: Sequence[StepEnd], images: int) -> Metrics:
    """Blank images as a share of `images`, and the peak of GPU memory, at the end of a step."""
    memory = [end.memory_gb for end in ends if end.memory_gb is not None]
    blank = {"health/blank_fraction": sum(end.blank for end in ends) / images}
    return blank | ({"gpu/memory_gb": max(memory)} if memory else {})
