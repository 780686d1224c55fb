"""The processes that hold the model: they sample, keep trajectories where these will be trained, and train.

`LocalFleet` works in this process and is the one to read. `RayFleet` adds processes that meet for collective calls and
are replaced when they die; `SplitFleet` has dedicated samplers, which get the weights of the trainers.
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
from typing import TYPE_CHECKING, TypeVar

import torch

from gerl.algorithms import KLWeight, build_algorithm
from gerl.algorithms.base import Pooled, pooled_sum
from gerl.cluster import Cluster, Pending, WorkerGroup, own_host, wait_all
from gerl.commandline.command import importing
from gerl.commandline.progress import waiting
from gerl.config import Config
from gerl.errors import CheckpointError, ConfigError, ModelError
from gerl.model.hub import Downloads
from gerl.protocol import Images, ModelFacts, RolloutTask, Sample, Segment, StepEnd, StepResult, UpdateStats
from gerl.run.checkpoint import FROZEN, PARTS, Checkpoint, WorkerState
from gerl.timeline import Timeline
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
POLL_S = 0.05  # between questions whether a file is written
STARTING = 600.0  # seconds, at least, for a worker to start, or to load the model from a slow disk


# --- Placement: micro-batches to processes; ranks in lockstep all make the same calls of the model.
#
# Ranks of a worker hold parts of the weights (model.shard) or of the tokens of a call (cluster.context) and exchange
# them in every call, so a rank with nothing left to sample repeats another one's micro-batch as padding.


@dataclass(frozen=True)
class Placement:
    """The process of each of M micro-batches, and in lockstep the groups that are processed at the same time.

    Example: five micro-batches of one kind on two workers of two ranks are the lockstep groups `[[0, 1], [2, 3], [4]]`
    on the processes `[0, 1, 2, 3, 0]`; process 1 repeats micro-batch 4.
    """

    processes: list[int]  # [M]
    groups: list[list[int]] = field(default_factory=list)  # micro-batches processed at the same time; lockstep only
    padding: list[tuple[int, int]] = field(default_factory=list)  # (micro-batch, process that repeats it)
    context: int = 1  # processes that share the tokens of a call: the one in `processes` and those after it

    @classmethod
    def in_turn(cls, count: int, processes: int) -> Placement:
        """Of `count` micro-batches, one process after the other."""
        return cls([i % processes for i in range(count)])

    def peers(self, number: int) -> range:
        """The processes that share the tokens of micro-batch `number` with its own."""
        first = self.processes[number]
        return range(first + 1, first + self.context)

    def padded(self, number: int) -> list[int]:
        """The processes that repeat micro-batch `number` as padding."""
        return self._padded.get(number, [])

    def copies_after(self, number: int) -> Iterator[tuple[int, int, bool]]:
        """The further calls after micro-batch `number`: (micro-batch, process, whether it is padding).

        Context-parallel peers make the same call; padding follows the last micro-batch of a lockstep group.
        """
        yield from ((number, process, False) for process in self.peers(number))
        first = self._firsts.get(number)
        if first is not None:
            yield from ((first, process, True) for process in self.padded(first))

    @cached_property
    def _firsts(self) -> dict[int, int]:
        """Last micro-batch of a lockstep group -> its first, which is repeated."""
        return {members[-1]: members[0] for members in self.groups}

    @cached_property
    def _padded(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for number, process in self.padding:
            found.setdefault(number, []).append(process)
        return found


def place(kinds: Sequence[Hashable], config: Config, processes: int) -> Placement:
    """Assign micro-batches to `processes` by their `kinds`, which are equal where they need the same calls."""
    if not config.lockstep:
        return Placement.in_turn(len(kinds), processes)
    ranks, context, found = config.lockstep_ranks, config.cluster.context, Placement([], context=config.cluster.context)
    for _, alike in groupby(range(len(kinds)), key=lambda i: kinds[i]):
        members = list(alike)
        for start in range(0, len(members), ranks // context):
            chosen = members[start : start + ranks // context]
            first = len(found.groups) * ranks % processes  # the first of the ranks in lockstep
            idle = first + len(chosen) * context
            found.groups.append(chosen)
            found.processes.extend(range(first, idle, context))
            found.padding.extend((chosen[0], process) for process in range(idle, first + ranks))
    return found


def call_pattern(task: RolloutTask) -> Hashable:
    """Equal for tasks that make the same calls of the model.

    That depends on their segments, the rows and trained steps of each, and on whether rows share a prefix, which is
    probed once with a pipeline that cannot branch.
    """

    def shares(s: Segment) -> bool:
        return s.parent is None and len(shared_prefixes([task.samples[leaf] for leaf in s.leaves])[0]) < len(s.leaves)

    return tuple(
        (len(s.seeds), s.parent, s.start, s.stop, len(s.window), len(s.trained), shares(s)) for s in task.segments
    )


# --- The fleet of a run


class Dispatch:
    """Micro-batches on their way through the samplers."""

    processes: list[int]  # [M] the sampler of each

    def submit(self, number: int) -> Pending[Images]:
        """Begin a micro-batch."""
        raise NotImplementedError

    def ended(self, number: int) -> None:
        """A micro-batch has ended."""

    def finish(self) -> Sequence[RolloutTask]:
        """All have ended; returns the tasks that are about to be trained on."""
        return []


class RoundRobin(Dispatch):
    """Micro-batches that `count` processes take in turn: `call(i)` begins the i-th of `total`."""

    def __init__(self, call: Callable[[int], Pending[Images]], count: int, total: int) -> None:
        self.call, self.processes = call, [number % count for number in range(total)]

    def submit(self, number: int) -> Pending[Images]:
        return self.call(number)


def kept_id(task: RolloutTask, padding: bool) -> int:
    """The id under which a process keeps the trajectory of `task`."""
    return padding_id(task.id) if padding else task.id


class LocalFleet:
    """Workers in this process, one on a CPU or one per GPU, each of which samples and trains."""

    def __init__(self, config: Config, cluster: Cluster, workers: Workers, timeline: Timeline) -> None:
        self.config, self.cluster, self.workers, self.timeline = config, cluster, workers, timeline
        self.trainers = self.samplers = workers
        self.lockstep = config.lockstep
        self.held: list[tuple[Sequence[RolloutTask], Placement]] = []  # trajectories of the step that is trained
        self.pools = build_algorithm(config).pools
        self.recovery: Recovery | None = None  # in this process no worker dies alone

    # --- start

    def check_model(self, downloads: Downloads) -> None:
        """Check the model before its weights are loaded; in this process that was done."""

    def set_up(self, new: Sequence[int], downloads: Downloads) -> list[ModelFacts]:
        """Load the model on the workers `new`."""
        loading = waiting(f"loading {self.config.model.path} on {len(new)} process(es)", downloads)
        with loading, self.timeline.span("load"):
            calls = [self.workers.submit(i, PolicyWorker.setup, self.workers.remote) for i in new]
            return wait_all(calls, self.starting, downloads)

    @property
    def starting(self) -> float:
        """Seconds of silence after which starting processes count as dead."""
        return max(STARTING, self.config.cluster.hang_after)

    # --- sample

    def sample(self, tasks: Sequence[RolloutTask]) -> Sampling:
        """Sample micro-batches; their trajectories stay on the process that will train them."""
        return Sampling(self, tasks)

    def validate(self, batches: Sequence[Sequence[Sample]]) -> Dispatch:
        """Sample held-out prompts with the averaged weights and the plain ODE sampler."""
        return Validating(self, batches)

    def sampled(self, step: int) -> None:
        """All images of `step` are sampled."""

    def sync(self, step: int, earlier: bool = False) -> None:
        """Let samplers use the weights of the finished `step`; here they are the trainers' own.

        `earlier`: in any case, and with the weights of earlier steps.
        """

    def forget_sync(self) -> None:
        """All workers start again with the same weights."""

    def place(self, kinds: Sequence[Hashable], processes: int) -> Placement:
        """Assign micro-batches of these `kinds` to `processes`."""
        return place(kinds, self.config, processes) if self.lockstep else Placement.in_turn(len(kinds), processes)

    # --- train

    def on_trajectories(self, function: Callable[[PolicyWorker, int], R]) -> list[R]:
        """Call `function(worker, task id)` for all trajectories of the step at once, on the workers that hold them."""
        pending, copies = list[Pending[R]](), list[tuple[int, int]]()
        for tasks, placement in self.held:
            for i, task in enumerate(tasks):
                pending.append(self.trainers.submit(placement.processes[i], function, task.id))
                copies += [(p, kept_id(tasks[k], padding)) for k, p, padding in placement.copies_after(i)]
        for process, task_id in copies:  # in lockstep the others make the same calls, whose answers do not count
            self.trainers.submit(process, function, task_id)
        return [call.result() for call in pending]

    def accumulate(self, credit: Credit, num_pairs: int, kl: KLWeight) -> UpdateStats:
        """Add the gradient of the tasks of `credit` on the trainers that hold them, as a part of `num_pairs` pairs."""
        groups = self.lockstep_groups(credit)
        pooled = self.pool(credit, groups, kl)
        return sum(self.trainers.run(PolicyWorker.accumulate, credit, num_pairs, pooled, groups, kl), UpdateStats())

    def step(self, finished: int, last: bool, resets: bool) -> list[StepResult]:
        """Take an optimizer step with the sum of all gradients; with `last` it ends the trainer step."""
        together = len(self.trainers) > 1 and self.trainers.remote
        if len(self.trainers) > 1 and not together:  # in this process there is no collective
            total = torch.stack(self.trainers.run(gradient)).sum(0)
            self.trainers.run(set_gradient, total)
        return self.trainers.run(PolicyWorker.step, finished, together, last, resets)

    def finish_step(self, step: int, results: Sequence[StepResult], resets: bool) -> list[StepEnd]:
        """End trainer step `step` on all processes, unless its last optimizer step did, whose `results` these are."""
        self.held.clear()
        if not results:
            return self.trainers.run(PolicyWorker.finish_step, step, resets)
        return [result.end for result in results if result.end is not None]

    def pool(self, credit: Credit, groups: Groups = None, kl: KLWeight | None = None) -> Pooled | None:
        """The group sums that losses need, from all trainers; None where the algorithm needs none."""
        return pooled_sum(self.trainers.run(PolicyWorker.pool, credit, groups, kl)) if self.pools else None

    def lockstep_groups(self, credit: Mapping[int, torch.Tensor]) -> list[list[int]] | None:
        """The ids of the tasks of each lockstep group with some of `credit`; None: not in lockstep."""
        if not self.lockstep:
            return None
        groups = [[tasks[i].id for i in members] for tasks, place in self.held for members in place.groups]
        return [members for members in groups if not credit.keys().isdisjoint(members)]

    def discard(self) -> None:
        """Forget everything of unfinished steps."""
        self.held.clear()

    def clear(self) -> None:
        """Drop trajectories and gradients on all workers."""
        self.workers.run(PolicyWorker.clear)

    # --- state

    def hold(self, step: int, process: int = 0) -> Held:
        """Hold the state of the finished `step` on `process` and its ranks, to write a checkpoint from it."""
        if self.config.model.train == "lora":
            return Held.of(*self.workers.submit(process, PolicyWorker.checkpoint, step).result())
        return hold_parts(self.workers, writers(self.config, process), step)

    def load(self, checkpoint: Checkpoint, numbers: WorkerState) -> None:
        """Continue from a checkpoint; raises `CheckpointError` if it does not fit."""
        if self.config.model.train == "lora":
            self.restore({"state.safetensors": checkpoint.read("state.safetensors")}, numbers, checkpoint.step)
        else:
            self.trainers.run(PolicyWorker.load, checkpoint.path.resolve(), numbers, checkpoint.step)
        self.sync(checkpoint.step, earlier=True)

    def restore(self, files: Mapping[str, bytes], numbers: WorkerState, step: int) -> None:
        """Let all trainers continue from the state of `step`."""
        self.trainers.run(PolicyWorker.load, files["state.safetensors"], numbers, step)


class Sampling(Dispatch):
    """Tasks on their way through the samplers, and copies of them where ranks are in lockstep."""

    def __init__(self, fleet: LocalFleet, tasks: Sequence[RolloutTask]) -> None:
        self.fleet, self.tasks = fleet, tasks
        self.patterns = [call_pattern(task) for task in tasks] if fleet.lockstep else [None] * len(tasks)
        self.placement = fleet.place(self.patterns, len(fleet.samplers))
        self.processes = self.placement.processes
        self.others: list[Pending[None]] = []  # copies in lockstep

    def submit(self, number: int) -> Pending[Images]:
        samplers, tasks = self.fleet.samplers, self.tasks
        images = samplers.submit(self.processes[number], PolicyWorker.sample, tasks[number])
        for k, process, padding in self.placement.copies_after(number):
            self.others.append(samplers.submit(process, sample_copy, tasks[k], kept_id(tasks[k], padding)))
        return images

    def finish(self) -> Sequence[RolloutTask]:
        """All tasks are sampled and about to be trained on; returns them, and raises what the copies raised."""
        for call in self.others:
            call.result()
        self.fleet.held.append((self.tasks, self.placement))
        return self.tasks


class Validating(Dispatch):
    """Held-out micro-batches on their way through the samplers."""

    def __init__(self, fleet: LocalFleet, batches: Sequence[Sequence[Sample]]) -> None:
        self.samplers, self.batches = fleet.samplers, batches
        self.placement = fleet.place([len(batch) for batch in batches], len(fleet.samplers))
        self.processes = self.placement.processes

    def submit(self, number: int) -> Pending[Images]:
        images = self.samplers.submit(self.processes[number], PolicyWorker.validate, number, self.batches[number])
        for k, process, _ in self.placement.copies_after(number):
            self.samplers.submit(process, PolicyWorker.validate, k, self.batches[k])
        return images


class RayFleet(LocalFleet):
    """Workers as processes over Ray, in one machine or many, which are replaced where they die."""

    def __init__(self, config: Config, cluster: Cluster, workers: Workers, timeline: Timeline) -> None:
        super().__init__(config, cluster, workers, timeline)
        self.recovery = Recovery(config, self)

    def check_model(self, downloads: Downloads) -> None:
        """On one machine the first process checks for all, on a cluster each where it is."""
        if not self.workers.remote:
            return
        with waiting(f"checking {self.config.model.path}", downloads):
            calls = [self.workers.submit(i, check, self.cluster.joined) for i in range(len(self.workers))]
            # the others only import what loads the model
            wait_all(calls if self.cluster.joined else calls[:1], self.starting, downloads)

    def set_up(self, new: Sequence[int], downloads: Downloads) -> list[ModelFacts]:
        """All processes meet for their collective calls, and those that are `new` load the model."""
        if (count := len(self.workers)) > 1 and self.workers.remote:
            with waiting(f"starting {count} processes, which have to meet"):
                for group in (group for group in self._meeting() if len(group) > 1):
                    (address,) = wait_all([group.submit(0, open_address)], self.starting)
                    ranks = range(len(group))
                    calls = [group.submit(i, PolicyWorker.join, address, i, len(group)) for i in ranks]
                    wait_all(calls, self.starting)
        return super().set_up(new, downloads)

    def _meeting(self) -> list[Workers]:
        return [self.trainers]


class SplitFleet(RayFleet):
    """Some workers only sample and others only train (cluster.layout=split); trajectories and weights travel."""

    def __init__(self, config: Config, cluster: Cluster, workers: Workers, timeline: Timeline) -> None:
        super().__init__(config, cluster, workers, timeline)
        self.trainers = workers.part(range(cluster.training))
        self.samplers = workers.part(range(cluster.training, cluster.processes))
        self.ends: list[Pending[StepEnd]] = []  # of samplers, for the step that is trained
        self.synced = 0  # the step whose weights the samplers have

    def _meeting(self) -> list[Workers]:
        """Samplers make collective calls only in lockstep."""
        return [self.trainers, self.samplers] if self.config.lockstep else [self.trainers]

    def sample(self, tasks: Sequence[RolloutTask]) -> Transfer:
        return Transfer(self, tasks)

    def sampled(self, step: int) -> None:
        """Let samplers drop what they have of `step`."""
        self.ends = [self.samplers.submit(i, end_step, step) for i in range(len(self.samplers))]

    def sync(self, step: int, earlier: bool = False) -> None:
        """Send the weights of the finished `step` to the samplers, unless they have them.

        `earlier`: in any case, with the weights of earlier steps, for steps that are sampled ahead once more.
        """
        if self.synced == step and not earlier:
            return
        # of sharded weights each rank has a part, that of the same rank elsewhere
        ranks = self.config.cluster.ranks_per_worker if self.config.model.train != "lora" else 1
        weights = [self.trainers.submit(rank, copy_weights, earlier).later() for rank in range(ranks)]
        calls = [self.samplers.submit(i, load_weights, weights[i % ranks]) for i in range(len(self.samplers))]
        wait_all(calls, self.samplers.hang_after)
        self.synced = step

    def forget_sync(self) -> None:
        self.synced = 0

    def finish_step(self, step: int, results: Sequence[StepResult], resets: bool) -> list[StepEnd]:
        ends = super().finish_step(step, results, resets) + [call.result() for call in self.ends]
        self.ends = []
        return ends

    def discard(self) -> None:
        super().discard()
        self.ends = []


class Transfer(Sampling):
    """Tasks that are sampled by one group of workers and trained on by another."""

    def __init__(self, fleet: SplitFleet, tasks: Sequence[RolloutTask]) -> None:
        super().__init__(fleet, tasks)
        self.holders = fleet.place(self.patterns, len(fleet.trainers))
        self.released: dict[int, Pending[Trajectory]] = {}
        self.received: list[Pending[None]] = []

    def submit(self, number: int) -> Pending[Images]:
        images = super().submit(number)
        process = self.processes[number]
        self.released[number] = self.fleet.samplers.submit(process, release, self.tasks[number].id)
        return images

    def ended(self, number: int) -> None:
        """Send the trajectory on; not before it is sampled, as a trainer would wait for it and for nothing else."""
        trajectory, own = self.released.pop(number).later(), self.tasks[number].id
        kept = [(process, own) for process in (self.holders.processes[number], *self.holders.peers(number))]
        kept += [(process, padding_id(own)) for process in self.holders.padded(number)]
        for process, task_id in kept:
            self.received.append(self.fleet.trainers.submit(process, receive, trajectory, task_id))

    def finish(self) -> Sequence[RolloutTask]:
        for call in [*self.others, *self.received]:
            call.result()
        self.fleet.held.append((self.tasks, self.holders))
        return self.tasks


# --- Checkpoints: a LoRA's is written at once, that of full fine-tuning beside the training by those that hold it.
#
# A checkpoint is complete or absent. A step of full fine-tuning pays for a copy of the state in main memory.


@dataclass(frozen=True)
class Held:
    """The state of a finished step, from which a checkpoint is written.

    `write`: writes its files into a folder. `check`: raises `ClusterError` if the writers hang. `at_once`: writing does
    not wait for other processes.
    """

    numbers: WorkerState
    write: Callable[[Path], None]
    check: Callable[[], object] = bool
    at_once: bool = True

    @classmethod
    def of(cls, files: Mapping[str, bytes], numbers: WorkerState) -> Held:
        """The state of a LoRA, whose files are here."""

        def write(folder: Path) -> None:
            for name, content in files.items():
                (folder / name).parent.mkdir(exist_ok=True)
                (folder / name).write_bytes(content)

        return cls(numbers, write)


class CheckpointWriter:
    """Writes checkpoints in a thread, one after the other."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "checkpoint")
        self._last: Future[None] | None = None
        self._check: Callable[[], object] = bool
        self._every: float | None = None

    def start(self, write: Callable[[], None], check: Callable[[], object], every: float | None) -> None:
        """Begin to write a checkpoint after `finish` of the previous one.

        `check` raises `ClusterError` if the writers hang; it is called `every` so many seconds of waiting.
        """
        self.finish()
        self._last, self._check, self._every = self._executor.submit(write), check, every

    def poll(self) -> None:
        """Raise `CheckpointError` if a checkpoint could not be written; does not wait for one in progress."""
        if self._last is not None and self._last.done():
            self.finish()

    def finish(self) -> None:
        """Wait for the current checkpoint; raises `CheckpointError` once if it cannot be written, or as `check`."""
        last, self._last = self._last, None
        if last is not None:
            while not wait([last], self._every).done:
                self._check()
            last.result()


def writers(config: Config, process: int) -> list[int]:
    """The processes that write a checkpoint together: the ranks of a worker, that of `process`, or this one alone."""
    if not config.lockstep:
        return [process]
    ranks = config.cluster.ranks_per_worker
    first = process - process % ranks
    return list(range(first, first + ranks))


def hold_parts(workers: WorkerGroup[PolicyWorker], members: Sequence[int], step: int) -> Held:
    """Let processes keep their parts of the state after `step`, and train while these are written."""
    from gerl.workers.state import hold_state, start_denoisers, start_state, written  # these import diffusers

    pending = [workers.submit(process, hold_state, step) for process in members]
    numbers = [call.result() for call in pending]

    def wait_until_written(processes: Sequence[int]) -> None:
        for process in processes:
            while True:
                call = workers.submit(process, written)
                call.wait()  # for however long: the steps that it trains meanwhile come first
                if call.ended():
                    break
                time.sleep(POLL_S)

    def write(folder: Path) -> None:
        place = folder.resolve()
        try:
            for number, process in enumerate(members):
                workers.submit(process, start_state, place, number)
            wait_until_written(members)
            found = len(list((place / PARTS).glob("*.safetensors")))
            if found != len(members):
                raise CheckpointError(
                    f"{len(members)} processes wrote a checkpoint, of which {found} are in {folder.parent}: use a run "
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


# --- functions of a worker


def check(worker: PolicyWorker, joined: bool) -> None:
    """Check the model before its weights are loaded, and import what loads it.

    On one machine the first process does so for all, on a cluster that is `joined` each process on its machine, which
    its error names. Raises `ModelError` or `ConfigError`.
    """
    with importing():
        from gerl.workers.setup import check_start  # in here: it takes seconds, and the driver does without
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
    """An address at which processes can meet for their collective calls."""
    return worker.meeting.open()


def sample_copy(worker: PolicyWorker, task: RolloutTask, kept: int) -> None:
    """Sample a task of another process in lockstep with it; only the trajectory is kept, under the id `kept`."""
    seed_everything("rollout", worker.config.trainer.seed, task.samples[0].step, task.id)
    worker.trajectories[kept] = worker.rollout.generate(task, worker.algorithm, worker.rank)[1]


def release(worker: PolicyWorker, task_id: int) -> Trajectory:
    """Hand over a trajectory that this worker sampled and another trains on."""
    return worker.trajectories.pop(task_id)


def receive(worker: PolicyWorker, trajectory: Trajectory, task_id: int) -> None:
    """Keep a trajectory that another worker sampled."""
    worker.trajectories[task_id] = trajectory


def copy_weights(worker: PolicyWorker, earlier: bool) -> Weights:
    """The weights of a trainer for samplers; `earlier`: with those of earlier steps, after a run was resumed."""
    from gerl.workers.state import weights_of  # in here: the driver does without diffusers

    return weights_of(worker.policy, earlier)


def load_weights(worker: PolicyWorker, weights: Weights) -> None:
    """Sample with the `weights` of a trainer from here on."""
    from gerl.workers.state import take_weights  # in here: the driver does without diffusers

    take_weights(worker.policy, weights)


def gradient(worker: PolicyWorker) -> torch.Tensor:
    """A worker's gradient as one vector on the CPU, where those of several devices meet."""
    return worker.actor.flat_gradient().cpu()


def set_gradient(worker: PolicyWorker, flat: torch.Tensor) -> None:
    """Replace a worker's gradient."""
    worker.actor.set_flat_gradient(flat)


def fleet_of(config: Config, cluster: Cluster, workers: Workers, timeline: Timeline) -> LocalFleet:
    """The fleet of a run's `workers`, by cluster.layout and cluster.launcher."""
    kind = SplitFleet if config.cluster.layout == "split" else RayFleet if workers.remote else LocalFleet
    return kind(config, cluster, workers, timeline)
