"""The processes that hold the model: they sample, store trajectories, and train.

`LocalFleet` works in this process and is the one to read first. `RayFleet` adds processes that join for collective
calls and are replaced when they die; `SplitFleet` has dedicated samplers, which receive the trainers' weights.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from gerl.algorithms import KLWeight, build_algorithm
from gerl.algorithms.base import Pooled, pooled_sum
from gerl.cluster import Cluster, Pending, WorkerGroup, own_host, wait_all
from gerl.config import Config
from gerl.errors import CheckpointError, ConfigError, ModelError
from gerl.model.hub import Downloads
from gerl.progress import Timeline, waiting
from gerl.protocol import Images, ModelFacts, RolloutTask, Sample, Segment, StepResult, UpdateStats
from gerl.rewards.rollouts import Dispatch
from gerl.run.checkpoint import FROZEN, PARTS, Checkpoint, WorkerState
from gerl.utils.imports import importing
from gerl.utils.seeding import seed_everything
from gerl.workers.recovery import Recovery
from gerl.workers.rollout import shared_prefixes
from gerl.workers.worker import Groups, PolicyWorker, end_step, padding_id

if TYPE_CHECKING:
    from gerl.engine import Trajectory
    from gerl.workers.state import Weights

R = TypeVar("R")
Workers = WorkerGroup[PolicyWorker]
Credit = dict[int, torch.Tensor]  # task id -> [B, T]
POLL_S = 0.05  # between checks whether a file is written
STARTING = 600.0  # minimum in seconds for a worker to start, or to load the model from a slow disk


# --- Placement of micro-batches on processes; ranks in lockstep all make the same model calls.
#
# Ranks of a worker hold shards of the weights (model.shard) or of the tokens of a call (cluster.context) and exchange
# them in every call, so a rank without work repeats another rank's micro-batch as padding.


@dataclass(frozen=True)
class Placement:
    """Process of each of M micro-batches, and in lockstep the groups processed at the same time.

    Example: five micro-batches of one kind on two workers of two ranks are the lockstep groups `[[0, 1], [2, 3], [4]]`
    on the processes `[0, 1, 2, 3, 0]`; process 1 repeats micro-batch 4.
    """

    processes: list[int]  # [M]
    groups: list[list[int]] = field(default_factory=list)  # micro-batches processed at the same time; lockstep only
    padding: list[tuple[int, int]] = field(default_factory=list)  # (micro-batch, process that repeats it)
    context: int = 1  # processes that split the tokens of a call: the one in `processes` and those after it

    @classmethod
    def in_turn(cls, count: int, processes: int) -> Placement:
        """Assign `count` micro-batches to processes in turn."""
        return cls([i % processes for i in range(count)])

    def peers(self, number: int) -> range:
        """Return the other processes that split the tokens of micro-batch `number`."""
        first = self.processes[number]
        return range(first + 1, first + self.context)

    def padded(self, number: int) -> list[int]:
        """Return the processes that repeat micro-batch `number` as padding."""
        return self._padded.get(number, [])

    def copies_after(self, number: int) -> Iterator[tuple[int, int, bool]]:
        """Yield the calls after `number` by context-parallel peers and as padding: (micro-batch, process, padding)."""
        yield from ((number, process, False) for process in self.peers(number))
        first = self._firsts.get(number)
        if first is not None:
            yield from ((first, process, True) for process in self.padded(first))

    @cached_property
    def _firsts(self) -> dict[int, int]:
        """Last micro-batch of each lockstep group -> its first, which is repeated as padding."""
        return {members[-1]: members[0] for members in self.groups}

    @cached_property
    def _padded(self) -> dict[int, list[int]]:
        processes: dict[int, list[int]] = {}
        for number, process in self.padding:
            processes.setdefault(number, []).append(process)
        return processes


def place(kinds: Sequence[Hashable], config: Config, processes: int) -> Placement:
    """Assign micro-batches to `processes` by their `kinds`, which are equal if they need the same model calls."""
    if not config.lockstep:
        return Placement.in_turn(len(kinds), processes)
    ranks, context, placement = (
        config.lockstep_ranks,
        config.cluster.context,
        Placement([], context=config.cluster.context),
    )
    for _, alike in groupby(range(len(kinds)), key=lambda i: kinds[i]):
        members = list(alike)
        for start in range(0, len(members), ranks // context):
            chosen = members[start : start + ranks // context]
            first = len(placement.groups) * ranks % processes  # the first of the ranks in lockstep
            idle = first + len(chosen) * context
            placement.groups.append(chosen)
            placement.processes.extend(range(first, idle, context))
            placement.padding.extend((chosen[0], process) for process in range(idle, first + ranks))
    return placement


def call_pattern(task: RolloutTask) -> Hashable:
    """Return a key that is equal for tasks with the same model calls: by rows, trained steps and shared prefixes."""

    def shares(s: Segment) -> bool:
        return s.parent is None and len(shared_prefixes([task.samples[leaf] for leaf in s.leaves])[0]) < len(s.leaves)

    return tuple(
        (len(s.seeds), s.parent, s.start, s.stop, len(s.window), len(s.trained), shares(s)) for s in task.segments
    )


# --- Fleet of a run


def kept_id(task: RolloutTask, padding: bool) -> int:
    """Return the id under which a process stores the trajectory of `task`."""
    return padding_id(task.id) if padding else task.id


class LocalFleet:
    """Workers in this process, one on a CPU or one per GPU, each of which samples and trains."""

    def __init__(self, config: Config, cluster: Cluster, workers: Workers, timeline: Timeline) -> None:
        self.config, self.cluster, self.workers, self.timeline = config, cluster, workers, timeline
        self.trainers, self.samplers = self._groups()
        self.lockstep = config.lockstep
        self.held: list[tuple[Sequence[RolloutTask], Placement]] = []  # trajectories of the current training step
        self.pools = build_algorithm(config).pools
        self.recovery: Recovery | None = None  # workers in this process cannot die alone
        self.downloads, self.writer = Downloads(), CheckpointWriter()
        self.model: ModelFacts  # once it is loaded

    def _groups(self) -> tuple[Workers, Workers]:
        """Return the workers that train, and those that sample."""
        return self.workers, self.workers

    # --- Start

    def check_model(self) -> None:
        """Check the model before its weights are loaded; does nothing in this process, which has checked it."""

    def begin_loading(self, new: Sequence[int]) -> list[Pending[ModelFacts]]:
        """Start loading the model on the workers `new`."""
        return [self.workers.submit(i, PolicyWorker.setup, self.workers.remote) for i in new]

    def set_up(self, new: Sequence[int], begun: Sequence[Pending[ModelFacts]] = ()) -> None:
        """Load the model on the workers `new`, or wait for the calls `begun` that load it; sets `model`."""
        loading = waiting(f"loading {self.config.model.path} on {len(new)} process(es)", self.downloads)
        with loading, self.timeline.span("load"):
            facts = wait_all(begun or self.begin_loading(new), self.starting, self.downloads)
        if facts:
            self.model = facts[0]

    @property
    def starting(self) -> float:
        """Seconds of silence after which starting processes count as dead."""
        return max(STARTING, self.config.cluster.hang_after)

    # --- Sampling

    def sample(self, tasks: Sequence[RolloutTask]) -> Sampling:
        """Sample micro-batches; their trajectories stay on the process that will train on them."""
        return Sampling(self, tasks)

    def validate(self, batches: Sequence[Sequence[Sample]]) -> Dispatch:
        """Sample held-out prompts with the averaged weights and the plain ODE sampler."""
        placement = self.place([len(batch) for batch in batches], len(self.samplers.workers))

        def submit(number: int) -> Pending[Images]:
            images = self.samplers.submit(placement.processes[number], PolicyWorker.validate, number, batches[number])
            for k, process, _ in placement.copies_after(number):
                self.samplers.submit(process, PolicyWorker.validate, k, batches[k])
            return images

        return Dispatch(submit, placement.processes)

    def sampled(self, step: int) -> None:
        """Handle the end of sampling for `step`."""

    def sync(self, step: int, earlier: bool = False) -> None:
        """Send separate samplers the weights of `step` unless they have them; `earlier`: always, with earlier ones."""

    def forget_sync(self) -> None:
        """Note that all workers start again with the same weights."""

    def place(self, kinds: Sequence[Hashable], processes: int) -> Placement:
        """Assign micro-batches of these `kinds` to `processes`."""
        return place(kinds, self.config, processes) if self.lockstep else Placement.in_turn(len(kinds), processes)

    # --- Training

    def on_trajectories(self, function: Callable[[PolicyWorker, int], R]) -> list[R]:
        """Call `function(worker, task id)` for all trajectories of the step concurrently, on their workers."""
        pending, copies = list[Pending[R]](), list[tuple[int, int]]()
        for tasks, placement in self.held:
            for i, task in enumerate(tasks):
                pending.append(self.trainers.submit(placement.processes[i], function, task.id))
                copies += [(p, kept_id(tasks[k], padding)) for k, p, padding in placement.copies_after(i)]
        for process, task_id in copies:  # in lockstep the others make the same calls, without using the results
            self.trainers.submit(process, function, task_id)
        return [call.result() for call in pending]

    def accumulate(self, credit: Credit, num_pairs: int, kl: KLWeight) -> UpdateStats:
        """Add the gradient of the tasks in `credit` on the trainers that hold them, as a part of `num_pairs` pairs."""
        return sum(self.on_credit(PolicyWorker.accumulate, credit, num_pairs, kl), UpdateStats())

    def on_credit(
        self, function: Callable[..., R], credit: Credit, num_pairs: int, kl: KLWeight, **options: Any
    ) -> list[R]:
        """Call `function(worker, credit, num_pairs, pooled, groups, kl, **options)` on all trainers."""
        groups = self.lockstep_groups(credit)
        pooled = self.pool(credit, groups, kl)
        return self.trainers.run(function, credit, num_pairs, pooled, groups, kl, **options)

    def step(self, finished: int, last: bool, resets: bool) -> list[StepResult]:
        """Take an optimizer step with the sum of all gradients; `last`: also end the trainer step."""
        return self.trainers.run(PolicyWorker.step, finished, self.sum_gradients(), last, resets)

    def sum_gradients(self) -> bool:
        """Sum the gradients of workers in one process; returns whether the next call has to, as a collective call."""
        together = len(self.trainers) > 1 and self.trainers.remote
        if len(self.trainers) > 1 and not together:
            total = torch.stack(self.trainers.run(gradient)).sum(0)
            self.trainers.run(set_gradient, total)
        return together

    def finish_step(self, step: int, results: Sequence[StepResult], resets: bool) -> list[StepResult]:
        """End trainer step `step` on all processes, unless its last optimizer step, with `results`, did so."""
        self.held.clear()
        if not results:
            return self.trainers.run(PolicyWorker.finish_step, step, resets)
        return [result for result in results if result.ended]

    def pool(self, credit: Credit, groups: Groups = None, kl: KLWeight | None = None) -> Pooled | None:
        """Return the group sums used in losses, from all trainers; None if the algorithm uses none."""
        return pooled_sum(self.trainers.run(PolicyWorker.pool, credit, groups, kl)) if self.pools else None

    def lockstep_groups(self, credit: Mapping[int, torch.Tensor]) -> list[list[int]] | None:
        """Return the task ids of each lockstep group with some of `credit`; None if not in lockstep."""
        if not self.lockstep:
            return None
        groups = [[tasks[i].id for i in members] for tasks, place in self.held for members in place.groups]
        return [members for members in groups if not credit.keys().isdisjoint(members)]

    def discard(self) -> None:
        """Discard the state of unfinished steps."""
        self.held.clear()

    def clear(self) -> None:
        """Drop trajectories and gradients on all workers."""
        self.workers.run(PolicyWorker.clear)

    # --- State

    def hold(self, step: int, process: int = 0) -> Held:
        """Hold the state of the finished `step` on `process` and its ranks, to write a checkpoint from it."""
        if self.config.model.train == "lora":
            return Held.of(*self.workers.submit(process, PolicyWorker.checkpoint, step).result())
        return hold_parts(self.workers, writers(self.config, process), step)

    def load(self, checkpoint: Checkpoint, numbers: WorkerState) -> None:
        """Resume from a checkpoint. Raises `CheckpointError` if it does not fit."""
        if self.config.model.train == "lora":
            self.restore({"state.safetensors": checkpoint.read("state.safetensors")}, numbers, checkpoint.step)
        else:
            self.trainers.run(PolicyWorker.load, checkpoint.path.resolve(), numbers, checkpoint.step)
        self.sync(checkpoint.step, earlier=True)

    def restore(self, files: Mapping[str, bytes], numbers: WorkerState, step: int) -> None:
        """Restore the state of `step` on all trainers."""
        self.trainers.run(PolicyWorker.load, files["state.safetensors"], numbers, step)


class Sampling(Dispatch):
    """Tasks being sampled, and in lockstep their copies on other ranks."""

    def __init__(self, fleet: LocalFleet, tasks: Sequence[RolloutTask]) -> None:
        self.fleet, self.tasks = fleet, tasks
        self.patterns = [call_pattern(task) for task in tasks] if fleet.lockstep else [None] * len(tasks)
        self.placement = fleet.place(self.patterns, len(fleet.samplers.workers))
        super().__init__(self.sample_batch, self.placement.processes)
        self.others: list[Pending[None]] = []  # copies in lockstep

    def sample_batch(self, number: int) -> Pending[Images]:
        samplers, tasks = self.fleet.samplers, self.tasks
        images = samplers.submit(self.processes[number], PolicyWorker.sample, tasks[number])
        for k, process, padding in self.placement.copies_after(number):
            self.others.append(samplers.submit(process, sample_copy, tasks[k], kept_id(tasks[k], padding)))
        return images

    def finish(self) -> Sequence[RolloutTask]:
        """Wait for the copies, raising their errors; return the tasks, which will be trained on."""
        for call in self.others:
            call.result()
        self.fleet.held.append((self.tasks, self.placement))
        return self.tasks


class RayFleet(LocalFleet):
    """Workers as processes over Ray, on one machine or several, replaced if they die."""

    def __init__(self, config: Config, cluster: Cluster, workers: Workers, timeline: Timeline) -> None:
        super().__init__(config, cluster, workers, timeline)
        self.recovery: Recovery = Recovery(config, workers, self.trainers, self.samplers)

    def hold(self, step: int, process: int = 0) -> Held:
        """Hold the state of `step`: of the first process the copy that is here, if any; else as `LocalFleet`."""
        state = None if process else self.recovery.copy_of(step)
        return super().hold(step, process) if state is None else Held.of(*state)

    def check_model(self) -> None:
        """Check the model: on one machine in the first process, on a cluster in each process."""
        if not self.workers.remote:
            return
        with waiting(f"checking {self.config.model.path}", self.downloads):
            calls = [self.workers.submit(i, check, self.cluster.joined) for i in range(len(self.workers))]
            # the other processes only import modules for loading the model
            wait_all(calls if self.cluster.joined else calls[:1], self.starting, self.downloads)

    def begin_loading(self, new: Sequence[int]) -> list[Pending[ModelFacts]]:
        """Join all processes for their collective calls, and start loading the model on the `new` ones."""
        if (count := len(self.workers)) > 1 and self.workers.remote:
            with waiting(f"starting {count} processes, which have to meet"):
                for group in (group for group in self._meeting() if len(group) > 1):
                    (address,) = wait_all([group.submit(0, open_address)], self.starting)
                    ranks = range(len(group))
                    calls = [group.submit(i, PolicyWorker.join, address, i, len(group)) for i in ranks]
                    wait_all(calls, self.starting)
        return super().begin_loading(new)

    def _meeting(self) -> list[Workers]:
        return [self.trainers]


class SplitFleet(RayFleet):
    """Separate workers for sampling and training (cluster.layout=split), which exchange trajectories and weights."""

    def __init__(self, config: Config, cluster: Cluster, workers: Workers, timeline: Timeline) -> None:
        super().__init__(config, cluster, workers, timeline)
        self.ends: list[Pending[StepResult]] = []  # from samplers, for the current training step
        self.synced = 0  # the step whose weights the samplers have

    def _groups(self) -> tuple[Workers, Workers]:
        training, workers = self.cluster.training, self.workers
        return workers.part(range(training)), workers.part(range(training, self.cluster.processes))

    def _meeting(self) -> list[Workers]:
        """Return the groups of workers with collective calls; samplers have them only in lockstep."""
        return [self.trainers, self.samplers] if self.config.lockstep else [self.trainers]

    def sample(self, tasks: Sequence[RolloutTask]) -> Transfer:
        return Transfer(self, tasks)

    def sampled(self, step: int) -> None:
        """Let samplers drop their trajectories of `step`."""
        self.ends = [self.samplers.submit(i, end_step, step) for i in range(len(self.samplers))]

    def sync(self, step: int, earlier: bool = False) -> None:
        """Send the weights of `step` to the samplers, unless they have them; `earlier`: see `LocalFleet`."""
        if self.synced == step and not earlier:
            return
        # ranks with sharded weights send their shards to the same ranks of the samplers
        ranks = self.config.cluster.ranks_per_worker if self.config.model.train != "lora" else 1
        weights = [self.trainers.submit(rank, copy_weights, earlier).later() for rank in range(ranks)]
        calls = [self.samplers.submit(i, load_weights, weights[i % ranks]) for i in range(len(self.samplers))]
        wait_all(calls, self.samplers.hang_after)
        self.synced = step

    def forget_sync(self) -> None:
        self.synced = 0

    def finish_step(self, step: int, results: Sequence[StepResult], resets: bool) -> list[StepResult]:
        ends = super().finish_step(step, results, resets) + [call.result() for call in self.ends]
        self.ends = []
        return ends

    def discard(self) -> None:
        super().discard()
        self.ends = []


class Transfer(Sampling):
    """Tasks sampled by one group of workers and trained on by another."""

    def __init__(self, fleet: SplitFleet, tasks: Sequence[RolloutTask]) -> None:
        super().__init__(fleet, tasks)
        self.holders = fleet.place(self.patterns, len(fleet.trainers))
        self.released: dict[int, Pending[Trajectory]] = {}
        self.received: list[Pending[None]] = []

    def sample_batch(self, number: int) -> Pending[Images]:
        images = super().sample_batch(number)
        process = self.processes[number]
        self.released[number] = self.fleet.samplers.submit(process, release, self.tasks[number].id)
        return images

    def ended(self, number: int) -> None:
        """Send the trajectory to its trainers; not earlier, since a trainer would block until it is sampled."""
        trajectory, own_id = self.released.pop(number).later(), self.tasks[number].id
        holders = [(process, own_id) for process in (self.holders.processes[number], *self.holders.peers(number))]
        holders += [(process, padding_id(own_id)) for process in self.holders.padded(number)]
        for process, task_id in holders:
            self.received.append(self.fleet.trainers.submit(process, receive, trajectory, task_id))

    def finish(self) -> Sequence[RolloutTask]:
        for call in [*self.others, *self.received]:
            call.result()
        self.fleet.held.append((self.tasks, self.holders))
        return self.tasks


# --- Checkpoints: a LoRA's is written at once; for full fine-tuning the processes write it while training goes on.
#
# A checkpoint is complete or absent. With full fine-tuning a step costs a copy of the state in main memory.


@dataclass(frozen=True)
class Held:
    """State of a finished step, from which a checkpoint is written.

    `write`: writes its files into a folder. `check`: raises `ClusterError` if the writers hang. `at_once`: whether
    writing does not wait for other processes.
    """

    numbers: WorkerState
    write: Callable[[Path], None]
    check: Callable[[], object] = bool
    at_once: bool = True

    @classmethod
    def of(cls, files: Mapping[str, bytes], numbers: WorkerState) -> Held:
        """Hold the state of a LoRA, given as files."""

        def write(folder: Path) -> None:
            for name, content in files.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(content)

        return cls(numbers, write)


class CheckpointWriter:
    """Writer of checkpoints in a thread, one after the other."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "checkpoint")
        self._last: Future[None] | None = None
        self._check: Callable[[], object] = bool
        self._every: float | None = None

    def start(self, write: Callable[[], None], check: Callable[[], object], every: float | None) -> None:
        """Write after the previous checkpoint is written; `check`, called every `every` s, raises if writers hang."""
        self.finish()
        self._last, self._check, self._every = self._executor.submit(write), check, every

    def poll(self) -> None:
        """Raise `CheckpointError` if a checkpoint could not be written; do not wait for one in progress."""
        if self._last is not None and self._last.done():
            self.finish()

    def finish(self) -> None:
        """Wait for the current checkpoint. Raises `CheckpointError` once if it failed, or as `check` does."""
        last, self._last = self._last, None
        if last is not None:
            while not wait([last], self._every).done:
                self._check()
            last.result()


def writers(config: Config, process: int) -> list[int]:
    """Return the processes that write a checkpoint together: all ranks of the worker of `process`, or it alone."""
    if not config.lockstep:
        return [process]
    ranks = config.cluster.ranks_per_worker
    first = process - process % ranks
    return list(range(first, first + ranks))


def hold_parts(workers: WorkerGroup[PolicyWorker], members: Sequence[int], step: int) -> Held:
    """Let processes hold their parts of the state after `step`, to train while these are written."""
    pending = [workers.submit(process, hold_state, step) for process in members]
    numbers = [call.result() for call in pending]

    def wait_until_written(processes: Sequence[int]) -> None:
        for process in processes:
            while True:
                call = workers.submit(process, written)
                call.wait()  # without timeout, since training steps submitted earlier run first
                if call.ended():
                    break
                time.sleep(POLL_S)

    def write(folder: Path) -> None:
        place = folder.resolve()
        try:
            for number, process in enumerate(members):
                workers.submit(process, start_state, place, number)
            wait_until_written(members)
            count = len(list((place / PARTS).glob("*.safetensors")))
            if count != len(members):
                raise CheckpointError(
                    f"{len(members)} processes wrote a checkpoint, of which {count} are in {folder.parent}: use a run "
                    "folder (hydra.run.dir) shared by all machines"
                )
            workers.submit(members[0], start_denoisers, place)
            wait_until_written(members[:1])
        finally:
            shutil.rmtree(place / FROZEN, ignore_errors=True)

    def check() -> None:
        for call in [workers.submit(process, written) for process in members]:
            call.result()

    return Held(numbers[0], write, check, at_once=False)


# --- Functions that run on a worker


def check(worker: PolicyWorker, joined: bool) -> None:
    """Check the model: on one machine the first process for all, on a cluster (`joined`) each, naming its machine."""
    with importing():
        from gerl.workers.setup import check_start  # imported lazily: it takes seconds, and the driver does not need it
    if worker.rank and not joined:
        return
    try:
        with importing():
            check_start(worker.config, worker.device)
    except (ModelError, ConfigError) as error:
        if not joined:
            raise
        raise type(error)(f"{error} (on {own_host()})") from error


def open_address(worker: PolicyWorker) -> str:
    """Open an address at which processes can join for their collective calls."""
    return worker.meeting.open()


def sample_copy(worker: PolicyWorker, task: RolloutTask, kept: int) -> None:
    """Sample a task in lockstep with another process, keeping only the trajectory, under the id `kept`."""
    seed_everything("rollout", worker.config.trainer.seed, task.samples[0].step, task.id)
    worker.trajectories[kept] = worker.generate(task)[1]


def release(worker: PolicyWorker, task_id: int) -> Trajectory:
    """Return and drop a trajectory sampled by this worker for training on another."""
    return worker.trajectories.pop(task_id)


def receive(worker: PolicyWorker, trajectory: Trajectory, task_id: int) -> None:
    """Store a trajectory sampled by another worker."""
    worker.trajectories[task_id] = trajectory


# calls that write a checkpoint of full fine-tuning: `hold_state` and then `start_state` on all writing processes,
# `start_denoisers` on the first of them, and `written` until each has ended


def hold_state(worker: PolicyWorker, step: int) -> WorkerState:
    """Hold this rank's shards of the checkpoint of `step`, written while training continues; return the counters."""
    from gerl.workers.actor import PartSnapshots  # imported lazily: the driver does not need diffusers
    from gerl.workers.state import Writing

    worker.check_has(step)
    assert isinstance(worker.snapshots, PartSnapshots)
    parts, numbers = worker.snapshots.take(step)
    worker.writing = Writing(worker.policy, parts)
    return numbers


def start_state(worker: PolicyWorker, folder: Path, number: int) -> None:
    """Start to write the held shards into the `folder` of a checkpoint, as writer `number`."""
    worker.writing.start(worker.writing.write_state, folder, number)


def start_denoisers(worker: PolicyWorker, folder: Path) -> None:
    """Start to write the averaged denoisers into `folder`, after all shards have been written."""
    worker.writing.start(worker.writing.write_denoisers, folder)


def written(worker: PolicyWorker) -> bool:
    """Whether the current write has ended. Raises its error."""
    return worker.writing.written()


def copy_weights(worker: PolicyWorker, earlier: bool) -> Weights:
    """Return a trainer's weights for samplers; `earlier`: including those of earlier steps, after a run was resumed."""
    from gerl.workers.state import weights_of  # imported lazily: the driver does not need diffusers

    return weights_of(worker.policy, earlier)


def load_weights(worker: PolicyWorker, weights: Weights) -> None:
    """Load the `weights` of a trainer, for sampling."""
    from gerl.workers.state import take_weights  # imported lazily: the driver does not need diffusers

    take_weights(worker.policy, weights)


def gradient(worker: PolicyWorker) -> torch.Tensor:
    """Return a worker's gradient as one vector on the CPU, to sum those of several devices."""
    return worker.actor.flat_gradient().cpu()


def set_gradient(worker: PolicyWorker, flat: torch.Tensor) -> None:
    """Replace a worker's gradient."""
    worker.actor.set_flat_gradient(flat)


def fleet_of(config: Config, cluster: Cluster, workers: Workers, timeline: Timeline) -> LocalFleet:
    """Return the fleet of a run's `workers` for cluster.layout and cluster.launcher."""
    kind = SplitFleet if config.cluster.layout == "split" else RayFleet if workers.remote else LocalFleet
    return kind(config, cluster, workers, timeline)
