"""The micro-batches of a step, from the workers that draw to the scorers and the workers that train on them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from gerl.cluster import Pending, WorkerGroup
from gerl.config import Config
from gerl.protocol import Images, RolloutTask, StepEnd
from gerl.rewards.manager import RewardManager
from gerl.trainer.credit import Scored
from gerl.trainer.owners import Owners, followers, kind, share
from gerl.trainer.rollouts import Rollouts
from gerl.workers.hybrid import HybridWorker, repeated

Workers = WorkerGroup[HybridWorker]


@dataclass
class Drawn:
    """The micro-batches of a step, the process that holds the trajectories of each, and what the scorers said."""

    tasks: list[RolloutTask] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)
    sets: list[list[int]] | None = None  # ids of the tasks trained on at the same time; None: not in lockstep
    repeats: list[tuple[int, int]] = field(default_factory=list)  # (id, process that has a repetition of the task)
    scored: Scored = field(default_factory=Scored)
    images: list[Pending[Images]] = field(default_factory=list)  # of the first tasks
    gate: torch.Tensor | None = None  # [B] factors of the samples' distances to the reference; None: 1


@dataclass(frozen=True)
class Rolled:
    """Micro-batches on their way: drawn, scored, and in the layout split brought to the workers that train."""

    tasks: Sequence[RolloutTask]
    holders: Owners  # of the trajectories
    rollouts: Rollouts
    others: list[Pending[None]]  # repetitions, and trajectories that are taken

    def end(self, drawn: Drawn, config: Config) -> None:
        """Add the tasks to `drawn`, when all of them are drawn; raises what bringing them raised."""
        for call in self.others:
            call.result()
        tasks = self.tasks
        if not drawn.tasks:
            drawn.images += self.rollouts.images
        drawn.tasks += tasks
        drawn.owners += self.holders.processes
        if config.lockstep:
            drawn.sets = (drawn.sets or []) + [[tasks[i].id for i in members] for members in self.holders.sets]
            drawn.repeats += [(tasks[i].id, process) for i, process in self.holders.repeats]


def roll_out(
    config: Config, manager: RewardManager, drawing: Workers, training: Workers, tasks: Sequence[RolloutTask]
) -> Rolled:
    """Begin to draw `tasks`; their images are scored meanwhile, and after that.

    `drawing` and `training` are the same workers in the layout hybrid.
    """
    kinds, split = [kind(task) for task in tasks], config.cluster.layout == "split"
    owners, others = share(kinds, config, len(drawing)), list[Pending[None]]()
    holders = share(kinds, config, len(training)) if split else owners
    brought = {}

    def submit(i: int) -> Pending[Images]:
        image = drawing.submit(owners.processes[i], HybridWorker.generate, tasks[i])
        if split:
            brought[i] = drawing.submit(owners.processes[i], HybridWorker.hand_over, tasks[i].id)
        also = [(i, follower, tasks[i].id) for follower in followers(owners.processes[i], config)]
        also += [(k, process, repeated(tasks[k].id)) for k, process in owners.repeated_after(i)]
        for k, process, kept in also:
            others.append(drawing.submit(process, HybridWorker.repeat, tasks[k], kept))
        return image

    def bring(i: int) -> None:
        """Not before it is drawn: a worker that trains would wait for it, and for nothing else."""
        if not split:
            return
        holder, trajectory = holders.processes[i], brought.pop(i).later()
        kept = [(process, tasks[i].id) for process in (holder, *followers(holder, config))]
        kept += [(process, repeated(tasks[i].id)) for process in holders.repeated_by(i)]
        others.extend(training.submit(process, HybridWorker.take, trajectory, number) for process, number in kept)

    samples, ahead = [task.samples for task in tasks], config.trainer.staleness
    rollouts = Rollouts(manager, samples, submit, owners.processes, drawing.hang_after, ahead, bring)
    return Rolled(tasks, holders, rollouts, others)


def end_drawing(config: Config, drawing: Workers, step: int) -> list[Pending[StepEnd]]:
    """Let workers that only draw drop what they have of `step`, when all of that is drawn."""
    if config.cluster.layout == "hybrid":
        return []
    return [drawing.submit(i, HybridWorker.end_drawing, step) for i in range(len(drawing))]
