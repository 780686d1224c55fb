"""What a run is going to do: its prompts and steps, when it validates, and the tasks of each step."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from gerl.algorithms import Algorithm
from gerl.algorithms.planning import (
    MixtureSchedule,
    PromptSchedule,
    plan_images,
    plan_prompts,
    plan_samples,
    planned_steps,
    prompt_schedule,
)
from gerl.config import Config
from gerl.protocol import Prompt, RolloutTask
from gerl.run.checkpoint import RunState

ID_STRIDE = 1_000_000  # between the task ids of steps sampled concurrently


class Plan:
    """Prompts and steps of a run.

    Example: 24 steps with `validation.every=6` have `steps` 24; `validates` is true for 0, 6, 12, 18 and 24.
    """

    def __init__(
        self,
        config: Config,
        prompts: Sequence[Prompt],
        held_out: Sequence[Prompt] = (),
        dataset_images: Sequence[Prompt] = (),
    ) -> None:
        """`dataset_images`: the prompts of `data.regularise`."""
        self.config, self.dataset_images = config, dataset_images
        self.looks: Collection[int] = ()
        self.choose(prompts, held_out[: config.validation.max_prompts])

    def choose(self, prompts: Sequence[Prompt], held_out: Sequence[Prompt]) -> None:
        """Train and validate on these prompts."""
        self.prompts, self.held_out = prompts, held_out
        self.steps = self.last_step = planned_steps(self.config, prompts)  # an extension may end the run sooner
        self._schedule: PromptSchedule | MixtureSchedule | None = None

    @property
    def schedule(self) -> PromptSchedule | MixtureSchedule:
        """The order of the prompts."""
        if self._schedule is None:
            self._schedule = prompt_schedule(self.config, self.prompts)
        return self._schedule

    def end_after(self, number: int | None) -> None:
        """Make step `number` the last one; None: the last planned one."""
        self.last_step = self.steps if number is None else number

    def look_after(self, steps: Collection[int]) -> None:
        """Let the base model look at some held-out images after these steps."""
        self.looks = steps

    def is_due(self, number: int, every: int) -> bool:
        """Whether what is done `every` so many steps, and after the last one, is due after step `number`."""
        return due(number, every, self.last_step)

    def validates(self, number: int) -> bool:
        """Whether the held-out prompts are sampled after step `number`."""
        return bool(self.held_out) and (number == 0 or self.is_due(number, self.config.validation.every))

    def prompts_of(self, number: int, attempt: int = 0) -> Sequence[Prompt]:
        """Return the prompts of a round of step `number`."""
        return plan_prompts(self.schedule, self.prompts, number, attempt)

    def tasks(
        self,
        algorithm: Algorithm,
        state: RunState,
        prompts: Sequence[Prompt],
        number: int,
        attempt: int = 0,
        begun: int = 0,
    ) -> list[RolloutTask]:
        """Plan the tasks of step `number` after the `begun` ones of earlier rounds, with ids unique in flight.

        state: after the last finished step.
        """
        staleness = self.config.trainer.staleness
        samples = plan_samples(self.config, prompts, number, state.policy_version)
        tasks = algorithm.plan(samples, first_id=begun + number % (staleness + 1) * ID_STRIDE)
        if self.dataset_images and attempt == 0:
            images = plan_samples(self.config, plan_images(self.config, self.dataset_images, number), number, 0)
            tasks += Algorithm.plan(algorithm, images, first_id=tasks[-1].id + 1)
        # sampled with the weights there were when the one before it was due, also before the run was resumed
        lag = max(0, state.step - max(0, number - 1 - staleness))
        return [replace(task, lag=lag) for task in tasks] if lag else tasks


def due(step: int, every: int, total: int) -> bool:
    """Whether what is done `every` so many steps, and after the last of `total`, is due after `step`."""
    return step == total or (every > 0 and step % every == 0)
