"""The processes that hold the model: they sample, keep trajectories where these will be trained, and train.

`LocalFleet` works in this process and is the one to read. `RayFleet` adds processes that meet for collective calls and
are replaced when they die; `SplitFleet` has dedicated samplers, which get the weights of the trainers.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch

from gerl.algorithms import KLWeight, build_algorithm
from gerl.algorithms.base import Pooled, pooled_sum
from gerl.cluster import Cluster, Pending, WorkerGroup, own_host, wait_all
from gerl.commandline.command import importing
from gerl.commandline.progress import waiting
from gerl.config import Config
from gerl.errors import ConfigError, ModelError
from gerl.model.hub import Downloads
from gerl.protocol import Images, ModelFacts, RolloutTask, Sample, StepEnd, StepResult, UpdateStats
from gerl.run.checkpoint import Checkpoint, WorkerState
from gerl.timeline import Timeline
from gerl.utils.seeding import seed_everything
from gerl.workers.checkpointing import Held, hold_parts, writers
from gerl.workers.placement import Placement, call_pattern, place
from gerl.workers.recovery import Recovery
from gerl.workers.worker import Groups, PolicyWorker, State, end_step, padding_id

if TYPE_CHECKING:
    from gerl.engine import Trajectory
    from gerl.workers.state import Weights

R = TypeVar("R")
Workers = WorkerGroup[PolicyWorker]
Credit = dict[int, torch.Tensor]  # task id -> [B, T]
STARTING = 600.0  # seconds, at least, for a worker to start, or to load the model from a slow disk


class Dispatch(Protocol):
    """Micro-batches on their way through the samplers: `submit` begins one, `ended` is called when it has ended."""

    processes: list[int]  # [M] the sampler of each

    def submit(self, number: int) -> Pending[Images]: ...

    def ended(self, number: int) -> None: ...

    def finish(self) -> Sequence[RolloutTask]: ...


class RoundRobin:
    """Micro-batches that `count` processes take in turn: `call(i)` begins the i-th of `total`."""

    def __init__(self, call: Callable[[int], Pending[Images]], count: int, total: int) -> None:
        self.call, self.processes = call, [number % count for number in range(total)]

    def submit(self, number: int) -> Pending[Images]:
        """Begin a micro-batch."""
        return self.call(number)

    def ended(self, number: int) -> None:
        """Nothing follows."""

    def finish(self) -> Sequence[RolloutTask]:
        """Nothing is trained on."""
        return []


class LocalFleet:
    """Workers in this process, one on a CPU or one per GPU, each of which samples and trains."""

    def __init__(self, config: Config, cluster: Cluster, workers: Workers, timeline: Timeline) -> None:
        self.config, self.cluster, self.workers, self.timeline = config, cluster, workers, timeline
        self.trainers = self.samplers = workers
        self.held: list[tuple[Sequence[RolloutTask], Placement]] = []  # trajectories of the step that is trained
        self.pools = build_algorithm(config).pools
        self.recovery: Recovery

    # --- start

    def check_model(self, downloads: Downloads) -> None:
        """Find out what can be known of the model before its weights are loaded; in this process that was done."""

    def set_up(self, new: Sequence[int], downloads: Downloads) -> list[ModelFacts]:
        """Load the model on the workers `new`."""
        loading = waiting(f"loading {self.config.model.path} on {len(new)} process(es)", downloads)
        with loading, self.timeline.span("load"):
            calls = [self.workers.submit(i, PolicyWorker.setup, self.workers.remote) for i in new]
            return wait_all(calls, self.starting, downloads)

    @property
    def starting(self) -> float:
        """Seconds without a word of processes that start after which they count as dead."""
        return max(STARTING, self.config.cluster.hang_after)

    # --- sample

    def sample(self, tasks: Sequence[RolloutTask]) -> "Sampling":
        """Sample micro-batches; their trajectories stay on the process that will train them."""
        return Sampling(self, tasks)

    def validate(self, batches: Sequence[Sequence[Sample]]) -> Dispatch:
        """Sample held-out prompts with the averaged weights and the plain ODE sampler."""
        return Validating(self, batches)

    def sampled(self, step: int) -> None:
        """All images of `step` are sampled."""

    def sync(self, step: int, earlier: bool = False) -> None:
        """Let samplers use the weights of the finished `step`; here they are the trainers' own.

        `earlier`: also where they have them, with the weights of earlier steps.
        """

    def forget_sync(self) -> None:
        """All workers have begun again, with the same weights."""

    # --- train

    def on_trajectories(self, function: Callable[[PolicyWorker, int], R]) -> list[R]:
        """Call `function` of a worker and a task id where the trajectory of each task of the step is, all at once."""
        pending, copies = list[Pending[R]](), list[tuple[int, int]]()
        for tasks, placement in self.held:
            for i, task in enumerate(tasks):
                pending.append(self.trainers.submit(placement.processes[i], function, task.id))
                copies += [(p, _kept_id(tasks[k], padding)) for k, p, padding in placement.copies_after(i)]
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
        if not self.config.lockstep:
            return None
        groups = [[tasks[i].id for i in members] for tasks, place in self.held for members in place.groups]
        return [members for members in groups if not credit.keys().isdisjoint(members)]

    def discard(self) -> None:
        """Forget what was begun of steps that are not finished."""
        self.held.clear()

    # --- recovery: in this process nobody dies alone

    def admit(self, ask: bool) -> list[int]:
        """Let replacements join for which there is room now; returns those that have to be set up.

        `ask`: for room for workers that have asked for none since they died.
        """
        return []

    def lost(self, error: Exception | None = None) -> list[int]:
        """The workers that died or do not answer; the others leave what they were doing."""
        return []

    def restart(self, lost: Sequence[int]) -> list[int]:
        """Start the workers `lost` anew; returns those that have to be set up."""
        return list(lost)

    def remember(self, step: int, parameters: int) -> None:
        """Keep a copy of the state of `step` outside of the workers, if it is small."""

    def copy_of(self, step: int) -> State | None:
        """That copy, if there is one."""
        return None

    def lost_metrics(self) -> dict[str, float]:
        """Workers replaced and seconds lost by it since the last time; nothing if there were none."""
        return {}

    def close(self) -> None:
        """End what is done beside the training."""

    def clear(self) -> None:
        """Drop trajectories and gradients on all workers."""
        self.workers.run(PolicyWorker.clear)

    # --- state

    def hold(self, step: int, process: int = 0) -> Held:
        """Keep the state of the finished `step`, as `process` and the ranks beside it have it, to write it from."""
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


class Sampling:
    """Tasks on their way through the samplers, and copies of them where ranks are in lockstep."""

    def __init__(self, fleet: LocalFleet, tasks: Sequence[RolloutTask]) -> None:
        self.fleet, self.tasks = fleet, tasks
        self.patterns = [call_pattern(task) for task in tasks] if fleet.config.lockstep else [None] * len(tasks)
        self.placement = place(self.patterns, fleet.config, len(fleet.samplers))
        self.processes = self.placement.processes
        self.others: list[Pending[None]] = []  # copies in lockstep

    def submit(self, number: int) -> Pending[Images]:
        """Begin to sample a task."""
        samplers, tasks = self.fleet.samplers, self.tasks
        images = samplers.submit(self.processes[number], PolicyWorker.sample, tasks[number])
        for k, process, padding in self.placement.copies_after(number):
            kept = _kept_id(tasks[k], padding)
            self.others.append(samplers.submit(process, sample_copy, tasks[k], kept))
        return images

    def ended(self, number: int) -> None:
        """A task is sampled."""

    def finish(self) -> Sequence[RolloutTask]:
        """All tasks are sampled and about to be trained on; returns them, and raises what the copies raised."""
        for call in self.others:
            call.result()
        self.fleet.held.append((self.tasks, self.placement))
        return self.tasks


class Validating:
    """Held-out micro-batches on their way through the samplers."""

    def __init__(self, fleet: LocalFleet, batches: Sequence[Sequence[Sample]]) -> None:
        self.samplers, self.batches = fleet.samplers, batches
        self.placement = place([len(batch) for batch in batches], fleet.config, len(fleet.samplers))
        self.processes = self.placement.processes

    def submit(self, number: int) -> Pending[Images]:
        """Begin to sample a micro-batch."""
        images = self.samplers.submit(self.processes[number], PolicyWorker.validate, number, self.batches[number])
        for k, process, _ in self.placement.copies_after(number):
            self.samplers.submit(process, PolicyWorker.validate, k, self.batches[k])
        return images

    def ended(self, number: int) -> None:
        """A micro-batch is sampled."""

    def finish(self) -> Sequence[RolloutTask]:
        """Nothing is left of a validation."""
        return []


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
                for group in self._meeting():
                    self._meet(group)
        return super().set_up(new, downloads)

    def admit(self, ask: bool) -> list[int]:
        return self.recovery.admit(ask)

    def lost(self, error: Exception | None = None) -> list[int]:
        return self.recovery.lost(error)

    def restart(self, lost: Sequence[int]) -> list[int]:
        return self.recovery.restart(lost)

    def remember(self, step: int, parameters: int) -> None:
        self.recovery.remember(step, parameters)

    def copy_of(self, step: int) -> State | None:
        return self.recovery.copy_of(step)

    def lost_metrics(self) -> dict[str, float]:
        return self.recovery.metrics()

    def close(self) -> None:
        self.recovery.close()

    def _meeting(self) -> list[Workers]:
        return [self.trainers]

    def _meet(self, group: Workers) -> None:
        if (count := len(group)) > 1:
            (address,) = wait_all([group.submit(0, open_address)], self.starting)
            wait_all([group.submit(i, PolicyWorker.join, address, i, count) for i in range(count)], self.starting)


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

    def sample(self, tasks: Sequence[RolloutTask]) -> "Transfer":
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
        self.holders = place(self.patterns, fleet.config, len(fleet.trainers))
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


def _kept_id(task: RolloutTask, padding: bool) -> int:
    return padding_id(task.id) if padding else task.id


# --- functions of a worker


def check(worker: PolicyWorker, joined: bool) -> None:
    """Find out what can be known of the model before its weights are loaded, and import what loads it.

    On one machine the first process does so for all; on a cluster that is `joined` each looks where it is, which its
    error names. Raises `ModelError` or `ConfigError`.
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


def release(worker: PolicyWorker, task_id: int) -> "Trajectory":
    """Hand over a trajectory that this worker sampled and another trains on."""
    return worker.trajectories.pop(task_id)


def receive(worker: PolicyWorker, trajectory: "Trajectory", task_id: int) -> None:
    """Keep a trajectory that another worker sampled."""
    worker.trajectories[task_id] = trajectory


def copy_weights(worker: PolicyWorker, earlier: bool) -> "Weights":
    """The weights of a trainer for samplers; `earlier`: with those of earlier steps, after a run was resumed."""
    from gerl.workers.state import weights_of  # in here: the driver does without diffusers

    return weights_of(worker.policy, earlier)


def load_weights(worker: PolicyWorker, weights: "Weights") -> None:
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
