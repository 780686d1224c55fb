"""Early gradients: over Ray, the update begins with the groups that are scored while others are still being scored.

Each task's gradient is accumulated by a separate call, in the order of the tasks, so that gradient and metrics equal
those of a single call bit for bit. When all scores are known, the credit of the step is compared with the credit used
early. If they differ, for example because a group was dropped, the gradient is discarded and computed again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from gerl.algorithms import Algorithm, KLWeight, Rewards, count_pairs
from gerl.config import Config
from gerl.errors import RewardError
from gerl.model.errors import is_full, raise_known, release
from gerl.protocol import RolloutTask, UpdateStats
from gerl.trainer.run import Extension, Run
from gerl.trainer.step import Step, credit_of, usable_rewards
from gerl.trainer.update import split_by_task, update_parts
from gerl.utils.tensors import PackedTensors
from gerl.workers.fleet import Sampling
from gerl.workers.worker import PolicyWorker

if TYPE_CHECKING:
    from gerl.cluster import Pending
    from gerl.rewards.manager import ScoringRound
    from gerl.rewards.rollouts import PendingRollout
    from gerl.workers.fleet import Workers

logger = logging.getLogger(__name__)
Accumulated = tuple[UpdateStats | None, float, float]  # None: out of memory; when the call began and ended


class EarlyGradients(Extension):
    """Accumulate gradients of scored groups while scores of others are missing."""

    gradient: EarlyGradient | None = None  # of the current step
    used = False  # or discarded

    @classmethod
    def wanted(cls, config: Config) -> bool:
        return config.cluster.launcher == "ray"

    def scoring(self, run: Run, step: Step, rollout: PendingRollout) -> Callable[[], None] | None:
        self.gradient, self.used = EarlyGradient.of(run, rollout), False
        return None if self.gradient is None else self.gradient.advance

    def accumulating(self, run: Run, step: Step, credit: PackedTensors, pairs: int, kl: KLWeight) -> UpdateStats | None:
        self.used = True
        return None if self.gradient is None else self.gradient.complete(credit, pairs, kl)

    def updating(self, run: Run, step: Step) -> bool:
        """Discard the gradient of a step that takes no optimizer step."""
        if self.gradient is not None and not self.used:
            self.gradient.discard()
            self.used = True
        return False

    def updated(self, run: Run, step: Step) -> None:
        if self.gradient is not None:
            step.metrics["timing/overlap_s"] = self.gradient.overlap


@dataclass
class EarlyGradient:
    """Gradient for the first optimizer step of a trainer step, accumulated task by task."""

    config: Config
    algorithm: Algorithm
    trainers: Workers
    scoring: ScoringRound
    tasks: list[RolloutTask]
    processes: list[int]  # of the tasks
    pairs: int  # (sample, timestep) pairs of all tasks, if no group is dropped
    credit: PackedTensors = field(default_factory=PackedTensors)  # of the submitted tasks
    calls: list[Pending[Accumulated]] = field(default_factory=list)
    ended: bool = False  # whether no further task is submitted early
    overlap: float = 0.0  # seconds, per trainer, of gradients computed while scores were missing

    @classmethod
    def of(cls, run: Run, rollout: PendingRollout) -> EarlyGradient | None:
        """Return the early gradient for `rollout`; None if credit depends on other groups or calls are collective."""
        config, algorithm, fleet = run.config, run.algorithm, run.fleet
        alone = algorithm.credits_groups_alone and not any(
            scorer.normalise == "batch" for scorer in config.reward.scorers.values()
        )
        together = fleet.lockstep or fleet.pools or config.trainer.staleness or fleet.samplers is not fleet.trainers
        changed = run.overriding("scored") or run.overriding("rewarded") or run.plan.dataset_images
        taken = run.rewards.people or any(each.takes_gradients for each in run.extensions.values())
        sampling, remote = rollout.dispatch, fleet.trainers.remote and run.rewards.remote
        if not (alone and remote and isinstance(sampling, Sampling)) or together or changed or taken:
            return None
        tasks = list(sampling.tasks)
        part = next(iter(update_parts(tasks, config.actor.updates_per_step, algorithm.whole_groups)))
        samples = [sample for task in tasks for sample in task.samples]
        nothing = Rewards(samples, torch.zeros(len(samples)), torch.zeros(len(samples), 0), torch.zeros(0))
        planned = split_by_task(tasks, algorithm.credit(nothing))
        pairs = count_pairs([(task, planned[task.id]) for task in part])
        return cls(config, algorithm, fleet.trainers, rollout.scoring, part, list(rollout.processes), pairs)

    def advance(self) -> None:
        """Submit the next tasks whose groups are scored; once all scores are known, the update does it."""
        while not self.ended and self.scoring.left and len(self.calls) < len(self.tasks):
            credit = self._credit(len(self.calls))
            if credit is None:
                return
            self._begin(credit)

    def complete(self, credit: PackedTensors, pairs: int, kl: KLWeight) -> UpdateStats | None:
        """Accumulate the remaining tasks; return the statistics of all, or None if the gradient was discarded."""
        scored = time.time()
        begun = len(self.calls)
        alike = all(_same(credit[i], before) for i, before in self.credit.items() if i in credit)
        if begun and alike and pairs == self.pairs and kl == self._kl and list(credit) == [t.id for t in self.tasks]:
            for task in self.tasks[begun:]:
                self._begin(credit[task.id])
            results = [call.result() for call in self.calls]
            stats = [stat for stat, _, _ in results if stat is not None]
            if len(stats) == len(results):
                order = sorted(range(len(stats)), key=lambda n: self.processes[n])
                seconds = sum(max(0.0, min(end, scored) - start) for _, start, end in results[:begun])
                sums = [
                    sum([stats[n] for n in order if self.processes[n] == process], UpdateStats())
                    for process in range(len(self.trainers))
                ]
                self.overlap = seconds / len(self.trainers)
                return sum(sums, UpdateStats())
        self.discard()
        return None

    def discard(self) -> None:
        """Discard the gradient on all trainers."""
        self.ended = True
        if self.calls:
            logger.debug("discarding the early gradient of %d task(s)", len(self.calls))
            self.trainers.run(drop_gradient)

    @property
    def _kl(self) -> KLWeight:
        return KLWeight(self.algorithm.kl_coef)

    def _credit(self, number: int) -> torch.Tensor | None:
        """Return the credit `[B, T]` of a task, None if a score of its groups is missing."""
        task, scoring = self.tasks[number], self.scoring
        groups = dict.fromkeys(sample.group for sample in task.samples)
        places = sorted(place for group in groups for place in scoring.groups[group])
        if not all(scoring.is_scored(batch) for batch, _ in places):
            return None
        (scores,) = scoring.scores_of([places])
        if None in scores.totals:
            self.ended = True
            return None
        try:
            rewards, _ = usable_rewards(self.config, scores)
        except RewardError:
            self.ended = True
            return None
        credit = credit_of(self.config, self.algorithm, scores, rewards)
        return credit[[n for n, (batch, _) in enumerate(places) if batch == number]]

    def _begin(self, credit: torch.Tensor) -> None:
        number = len(self.calls)
        measured = bool(credit.nan_to_num().any()) and not any(bool(c.nan_to_num().any()) for c in self.credit.values())
        task = self.tasks[number]
        self.credit[task.id] = credit
        packed = PackedTensors({task.id: credit})
        self.calls.append(
            self.trainers.submit(self.processes[number], add_task_gradient, packed, self.pairs, self._kl, measured)
        )


def add_task_gradient(
    worker: PolicyWorker, credit: PackedTensors, pairs: int, kl: KLWeight, measured: bool
) -> Accumulated:
    """Accumulate the gradient of a task on the `worker`; `measured`: also measure it by step."""
    started = time.time()
    (batches,) = worker.batches(credit, kl=kl).values()
    worker.algorithm.set_kl_weight(kl)
    try:
        return worker.actor.accumulate(batches, pairs, by_step=measured), started, time.time()
    except (MemoryError, RuntimeError) as error:
        if not is_full(error):
            raise_known(error, "update")
            raise
        release(error)
    return None, started, time.time()  # the update runs again with smaller micro-batches


def drop_gradient(worker: PolicyWorker) -> None:
    worker.actor.optimizer.zero_grad(set_to_none=True)
    worker.evaluations.taken()


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())
