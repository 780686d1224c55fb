"""The worker: rollout and training with one pipeline on one device; if it does both, it keeps the trajectories."""

from __future__ import annotations  # annotations name classes that the driver does not import

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

import torch

from gerl.algorithms import Algorithm, Batch, KLWeight, batches_of, build_algorithm
from gerl.algorithms.base import Pooled
from gerl.config import Config
from gerl.errors import ClusterError
from gerl.model.errors import model_errors, raise_known
from gerl.model.prompts import check_arguments
from gerl.objects import Function
from gerl.protocol import NO_UPDATE, Images, StepResult, UpdateStats
from gerl.utils.files import capture_logs, pass_on_logs
from gerl.utils.imports import importing
from gerl.utils.seeding import seed_everything
from gerl.workers.collective import Meeting, Ranks
from gerl.workers.image_statistics import image_statistics
from gerl.workers.rollout import Rollout, count_blank
from gerl.workers.service import build_rollout

if TYPE_CHECKING:
    import numpy as np

    from gerl.engine import Trajectory
    from gerl.engine.hooks import Evaluations
    from gerl.model.policy import Policy
    from gerl.protocol import ModelFacts, RolloutTask, Sample
    from gerl.run.checkpoint import WorkerFiles, WorkerState
    from gerl.workers.actor import Actor, PartSnapshots, Snapshots
    from gerl.workers.base_judge import BaseJudge
    from gerl.workers.state import Writing

P = ParamSpec("P")
R = TypeVar("R")
Credit = dict[int, torch.Tensor]  # by task id, [B, T]
Groups = Sequence[Sequence[int]] | None  # ids of the tasks of each lockstep group


def padding_id(task_id: int) -> int:
    """Return the id of a trajectory that a rank in lockstep samples only as padding."""
    return ~task_id


def peak_memory(device: str | torch.device) -> float | None:
    """Return the peak GPU memory in GB reserved by torch on `device` since the last call; None on a CPU."""
    if torch.device(device).type != "cuda":
        return None
    peak = torch.cuda.max_memory_reserved(device) / 1e9
    torch.cuda.reset_peak_memory_stats(device)
    return peak


class PolicyWorker:
    """Process that holds the model: it samples, stores trajectories and trains on them.

    All workers hold the same trained weights and optimizer state, and share the images of a step; with
    cluster.layout=split some only sample and others only train. Each rank of a worker holds a shard of the weights
    (model.shard) or of the tokens of a call (cluster.context), so all of them make the same calls; of context-parallel
    ranks only the first reports. Rare requests are functions of a worker, see `call`.
    """

    def __init__(
        self, config: Config, rank: int, device: str, threads: int, total_updates: int,
        functions: Mapping[str, Function] | None = None,
    ) -> None:  # fmt: skip
        """Store the settings; `functions`: scorers of the driver's program by name, for differentiable rewards."""
        self.config, self.rank, self.device, self.threads = config, rank, device, threads
        self.functions = functions or {}
        self.total_updates = total_updates
        self.trajectories: dict[int, Trajectory] = {}  # by task id
        self.ended: int | None = None  # last finished trainer step; None: nothing is loaded
        self.blank: Counter[int] = Counter()  # by step: number of images of a single colour
        self.rollout_evaluations: Counter[int] = Counter()  # by step: those of its samples, which may be made ahead
        self.notes: list[str] = []  # messages of this step for the run's log
        self.meeting = Meeting()
        self.ranks: Ranks | None = None  # in lockstep
        self.leads = rank % config.cluster.context == 0  # whether this is the first of the context-parallel ranks
        self.policy: Policy
        self.evaluations: Evaluations  # of training since the last finished trainer step
        self.rollout: Rollout
        self.judge: BaseJudge | None = None
        self.actor: Actor
        self.snapshots: Snapshots | PartSnapshots
        self.algorithm: Algorithm
        self.writing: Writing

    # --- Start and end

    def setup(self, remote: bool = False) -> ModelFacts:
        """Load the pipeline, set up rollout and actor; `remote`: from now on forward the log to the run's."""
        with importing():  # imported lazily: the driver needs neither diffusers nor its dependencies
            from torch.distributed.tensor import DTensor

            from gerl.engine.hooks import count_evaluations
            from gerl.model.denoisers import quiet_libraries
            from gerl.workers.actor import Actor, check_optimizer, snapshots_of
            from gerl.workers.base_judge import BaseJudge
            from gerl.workers.setup import give_reward, model_facts, observe_states

        torch.set_num_threads(self.threads)
        quiet_libraries()
        check_optimizer(self.config.actor, self.device)
        seed_everything("worker", self.config.trainer.seed)
        model = self.config.model
        with capture_logs("gerl.model", logging.INFO) as notes, model_errors("loading"):
            self.policy = self.load_policy()
        self.evaluations = count_evaluations(self.policy.denoisers.values())
        guidance = getattr(self.config.algorithm, "reference_guidance", None)
        check_arguments(type(self.policy.pipe), self.config.sampling, guidance_scale=guidance)
        self.rollout = build_rollout(self.policy, self.config)
        self.rollout.format.divides = self.ranks is None  # ranks in lockstep have to make the same calls
        self.rollout.format.say = self.notes.append
        if self.config.needs_base:
            self.judge = BaseJudge.of(self.rollout, self.config)
        self.rollout.scores_latents = self.config.reward.by_latents("training") is not None
        self.algorithm = build_algorithm(self.config)
        give_reward(self.algorithm, self.device, self.functions, self.judge)
        if self.algorithm.needs.values:
            observe_states(self.rollout, self.config)
        first = next(iter(self.policy.trained.values()))
        group = first.device_mesh.get_group() if isinstance(first, DTensor) else None
        settings = replace(self.config.actor, lr=self.config.actor.rate(model.train))
        staleness = self.config.trainer.staleness
        reduced, updates = getattr(torch, model.reduce_dtype), self.total_updates
        self.actor = Actor(self.policy, settings, self.algorithm, updates, self.ranks, group, staleness, reduced)
        self.actor.say = self.notes.append
        self.snapshots = snapshots_of(self.actor)
        self.ended = 0
        if remote:
            pass_on_logs("gerl", logging.INFO, self.notes.append)
        return model_facts(self.policy, self.config, notes)

    def load_policy(self) -> Policy:
        """Load the pipeline and what is trained of it."""
        from gerl.workers.setup import load_worker_policy  # imported lazily, as in `setup`

        return load_worker_policy(self.config, self.device, self.ranks)

    def join(self, address: str, rank: int, world_size: int) -> None:
        """Join the process group as `rank`, before the model is loaded; a collective call."""
        self.meeting.join(address, rank, world_size, self.device)
        if self.config.lockstep:
            self.ranks = Ranks(self.device, self.config.lockstep_ranks, self.config.cluster.context)

    def leave(self) -> None:
        """Abandon the current step and leave the process group."""
        self.meeting.leave()
        if hasattr(self, "actor"):
            self.clear()
            self.evaluations.taken()

    def call(self, function: Callable[Concatenate[PolicyWorker, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call `function` with this worker, for requests without a method of their own."""
        return function(self, *args, **kwargs)

    # --- Sampling

    def sample(self, task: RolloutTask) -> Images:
        """Sample a micro-batch and store its trajectory."""
        start, step = time.perf_counter(), task.samples[0].step
        if self.ended:
            self.snapshots.begin(self.ended)  # all workers have finished that step, or nothing new was sampled
        seed_everything("rollout", self.config.trainer.seed, step, task.id)
        before = self.evaluations.forward
        pixels, self.trajectories[task.id], scores = self.generate(task)
        self.rollout_evaluations[step] += self.evaluations.forward - before
        self.evaluations.forward = before
        self.blank[step] += count_blank(pixels)
        return Images(task.id, pixels, time.perf_counter() - start, scores=scores)

    def generate(self, task: RolloutTask) -> tuple[np.ndarray, Trajectory, dict[str, np.ndarray]]:
        """Sample a micro-batch: images, their trajectory, and the scores that follow from their latents."""
        pixels, trajectory = self.rollout.generate(task, self.algorithm, self.rank)
        if not self.rollout.scores_latents or task.samples[0].prompt.dataset_images:
            return pixels, trajectory, {}
        assert self.judge is not None
        errors = self.judge(self.rollout.finished_calls(trajectory), task.samples[0].step)
        return pixels, trajectory, self.judge.scores(errors)

    def validate(self, task_id: int, samples: Sequence[Sample]) -> Images:
        """Sample held-out prompts with the averaged weights and the plain ODE sampler."""
        from gerl.engine.hooks import uncounted  # imported lazily, as in `setup`

        start = time.perf_counter()
        with uncounted(self.policy.pipe):
            pixels, calls = self.rollout.validate(samples)
            statistics = image_statistics(pixels)
            scores: dict[str, np.ndarray] = {}
            judging = time.perf_counter()
            if self.judge is not None:
                errors = self.judge(calls)
                statistics |= errors if self.config.judges else {}
                scores = self.judge.scores(errors) if self.config.reward.by_latents("validation") is not None else {}
        end = time.perf_counter()
        return Images(task_id, pixels, end - start, statistics, end - judging, scores)

    # --- Training

    def pool(self, credit: Credit, groups: Groups = None, kl: KLWeight | None = None) -> Pooled:
        """Return this worker's contribution to the group sums used in the losses of other workers' samples."""
        self.algorithm.set_kl_weight(kl)
        batches = list(chain(*self.batches(credit, groups).values()))
        with model_errors("update"):
            pooled = self.actor.retry_on_oom(batches, lambda: self.actor.pool(batches))
        return pooled if self.leads else {}

    def accumulate(
        self,
        credit: Credit,
        num_pairs: int,
        pooled: Pooled | None = None,
        groups: Groups = None,
        kl: KLWeight | None = None,
    ) -> UpdateStats:
        """Add the gradient of tasks in `credit`, id -> `[B, T]`, with the sums `pooled` and lockstep `groups`."""
        first = next((i for i, v in credit.items() if v.nan_to_num().any()), None)
        batches = self.batches(credit, groups, pooled, kl)
        self.algorithm.set_kl_weight(kl)
        try:
            stats = self.actor.accumulate_tasks(batches, num_pairs, first)
        except (MemoryError, RuntimeError) as error:
            raise_known(error, "update")
            raise
        return stats if self.leads else UpdateStats()

    def step(self, finished: int, together: bool = False, last: bool = False, resets: bool = False) -> StepResult:
        """Take an optimizer step, `together` with the sum of all workers' gradients; `last`: then `finish_step`."""
        self.snapshots.take(finished)
        if together:
            self.reduce_gradient()
        result = self.actor.step(finished)
        return self.finish_step(finished + 1, resets, result) if last else result

    def finish_step(self, step: int, resets: bool = False, result: StepResult = NO_UPDATE) -> StepResult:
        """End trainer step `step` and return `result` with its report; `resets`: also move the reference."""
        self.snapshots.take(step - 1)
        self.actor.finish_step(step, resets)
        self.ended = step
        return end_step(self, step, result)

    def reduce_gradient(self) -> None:
        """Sum the gradients of all workers; a collective call."""
        self.actor.all_reduce()

    def clear(self, step: int | None = None) -> None:
        """Drop gradients, and the trajectories up to a finished `step`, or all."""
        for i in [
            i for i, trajectory in self.trajectories.items() if step is None or trajectory.task.samples[0].step <= step
        ]:
            del self.trajectories[i]
        for counts in (self.blank, self.rollout_evaluations):
            for k in [k for k in counts if step is None or k <= step]:
                del counts[k]
        self.actor.optimizer.zero_grad(set_to_none=True)

    def batches(
        self, credit: Credit, groups: Groups = None, pooled: Pooled | None = None, kl: KLWeight | None = None
    ) -> dict[int, list[Batch]]:
        """Return the batches of each task here; in lockstep of one task of each group, with NaN as missing credit."""
        trajectories = self.trajectories
        if groups is not None:
            task_ids = [i for members in groups for i in (*members, padding_id(members[0])) if i in trajectories]
            nothing = torch.full((1, self.config.sampling.num_inference_steps), torch.nan)
            credit = {i: credit.get(i, nothing.expand(len(trajectories[i].task.samples), -1)) for i in task_ids}
        own_credit = {i: values for i, values in credit.items() if i in trajectories}
        return {i: batches_of(trajectories[i], v, pooled, kl.of(i) if kl else None) for i, v in own_credit.items()}

    # --- State

    def check_has(self, step: int) -> None:
        """Raise `ClusterError` unless this worker has the state after trainer step `step`."""
        if self.ended is None or step not in (self.ended, self.snapshots.step):
            raise ClusterError(f"rank {self.rank} was restarted and does not have the state of step {step}")

    def checkpoint(self, step: int) -> WorkerFiles:
        """Return a LoRA's checkpoint after `step`: exact state, averaged LoRA. Raises `ClusterError` if it is gone."""
        from gerl.workers.actor import Snapshots  # imported lazily, as in `setup`
        from gerl.workers.state import checkpoint_files

        self.check_has(step)
        assert isinstance(self.snapshots, Snapshots)
        return checkpoint_files(self.snapshots, self.policy, step)

    def load(self, source: bytes | Path, numbers: WorkerState, step: int) -> None:
        """Resume from the state after `step`: bytes of a LoRA's, or a checkpoint. Raises `CheckpointError` if unfit."""
        from gerl.workers.actor import snapshots_of  # imported lazily, as in `setup`
        from gerl.workers.state import load_state

        self.ended, self.snapshots = None, snapshots_of(self.actor)
        load_state(self.actor, source, numbers)
        self.ended = step


def end_step(worker: PolicyWorker, step: int, result: StepResult = NO_UPDATE) -> StepResult:
    """End trainer step `step` of a worker, which may only sample; return `result` with its report."""
    blank, notes = worker.blank[step], worker.notes.copy()
    counted = worker.evaluations
    forward, backward = counted.forward + worker.rollout_evaluations[step], counted.backward
    if not worker.leads:
        forward = backward = 0
    counted.forward = counted.backward = 0
    worker.clear(step)
    worker.notes.clear()
    memory = peak_memory(worker.device)
    return replace(result, ended=True, blank=blank, notes=notes, memory_gb=memory, forward=forward, backward=backward)
