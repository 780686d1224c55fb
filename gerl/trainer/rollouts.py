"""Rollouts in flight: of the current step, and with `trainer.staleness` of the next ones."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from gerl.config import Config
from gerl.progress import MOMENT, waiting
from gerl.protocol import RolloutTask
from gerl.rewards.manager import RewardManager
from gerl.rewards.rollouts import PendingRollout, serve_in_background
from gerl.trainer.step import Step
from gerl.workers.fleet import LocalFleet


class Rollouts:
    """Start rollouts, wait for their images and scores, and keep samplers and scorers busy meanwhile."""

    def __init__(self, config: Config, fleet: LocalFleet, rewards: RewardManager) -> None:
        self.config, self.fleet, self.rewards = config, fleet, rewards
        self.ahead: dict[int, PendingRollout] = {}  # by step: sampled or in flight, not yet trained on
        self.patience = MOMENT  # seconds of a step without a line of the log: the first one is announced

    @property
    def next(self) -> list[PendingRollout]:
        """The rollouts of the steps after the one being trained."""
        return [rollout for _, rollout in sorted(self.ahead.items())]

    def start(self, tasks: Sequence[RolloutTask], fleet: LocalFleet | None = None) -> PendingRollout:
        """Start sampling `tasks` on `fleet`, by default that of the run; images are scored as they arrive."""
        fleet, batches = fleet or self.fleet, [task.samples for task in tasks]
        dispatch, ahead = fleet.sample(tasks), self.config.trainer.staleness
        return PendingRollout(self.rewards, batches, dispatch, fleet.samplers.hang_after, ahead)

    def wait_until_sampled(self, rollout: PendingRollout, step: Step) -> None:
        """Wait until all images of a rollout are sampled; scoring continues meanwhile."""
        what = "sampling" if self.config.data.train_on == "rollouts" else "reading"
        announced = f"{what} {rollout.total} images"
        with waiting(announced, self.progress_of(rollout), self.patience), step.watch("rollout"):
            rollout.wait_until_sampled()

    def score(
        self,
        rollout: PendingRollout,
        step: Step,
        meanwhile: Callable[[], None] | None = None,
        dataset_images: bool = False,
    ) -> None:
        """Wait for the scores of a rollout and add both to the step.

        meanwhile: called while scores are missing. dataset_images: whether some of the images are from files, which
        have no scores.
        """
        announced = f"scoring {rollout.total} images"
        with waiting(announced, self.progress_of(rollout), self.patience), step.watch("reward_wait"):
            scores_by_task = rollout.finish(self.next, meanwhile)
        tasks = rollout.dispatch.finish()
        for task, scores in zip(tasks, scores_by_task, strict=True):
            if not dataset_images or task.samples[0].dataset_image is None:
                step.scores.add(scores)
        step.images += rollout.images
        step.rounds, step.round = step.rounds + 1, tasks
        step.tasks += tasks

    def sync(self, finished: int, step: Step) -> None:
        """Sync the weights of the `finished` step to dedicated samplers, after their current calls."""
        if self.fleet.samplers is self.fleet.trainers:
            return
        for rollout in self.next:
            self.wait_until_sampled(rollout, step)
        self.fleet.sync(finished)

    def progress_of(self, rollout: PendingRollout) -> Callable[[], str]:
        """Describe the progress of sampling and of downloads."""
        return lambda: ", ".join(filter(None, (rollout.progress(), self.fleet.downloads())))

    def served(self) -> AbstractContextManager[None]:
        """Keep samplers and scorers busy with the next steps during an update."""
        return serve_in_background(self.rewards, self.next) if self.ahead else nullcontext()

    def discard(self) -> None:
        """Discard images and scores of unfinished steps."""
        self.ahead.clear()
        self.fleet.discard()
        self.rewards.give_up()
