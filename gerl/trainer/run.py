"""A run: the parts that the training loop works with, the state after the last finished step, and its extensions."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from gerl.algorithms import Algorithm, KLWeight, build_algorithm
from gerl.commandline import signals
from gerl.config import Config
from gerl.errors import CheckpointError, ClusterError
from gerl.progress import REMINDER, waiting
from gerl.protocol import Prompt, UpdateStats
from gerl.rewards.manager import RewardManager
from gerl.rewards.rollouts import PendingRollout
from gerl.run.checkpoint import Checkpoint, RunState, save_checkpoint
from gerl.run.choice import prune
from gerl.trainer.history import History
from gerl.trainer.plan import Plan
from gerl.trainer.roles import POLICY, Role
from gerl.trainer.rollouts import Rollouts
from gerl.trainer.run_folder import check_identity
from gerl.trainer.step import RollBack, Step, logger
from gerl.trainer.update import Update
from gerl.utils.tensors import PackedTensors
from gerl.workers.fleet import Held, LocalFleet

if TYPE_CHECKING:
    from gerl.cluster import Pending
    from gerl.protocol import Images, Sample, Scores

    HeldOut = tuple[LocalFleet, list[list[Sample]]]  # micro-batches, and the fleet that samples them


class Run:
    """A run's processes and its state after the last finished step; the driver holds no model and moves only images.

    `load_run` of `gerl.trainer.start` makes it, `train` of `gerl.trainer.loop` trains it. Only its own methods write
    its attributes and its state.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        plan: Plan,
        fleet: LocalFleet,
        rewards: RewardManager,
        extensions: Mapping[str, Extension],
        state: RunState,
        started: float | None = None,
    ) -> None:
        """`started`: a time of `time.perf_counter`."""
        self.config, self.run_dir, self.plan, self.fleet, self.rewards = config, run_dir, plan, fleet, rewards
        self.extensions, self.state = extensions, state
        self.rollouts = Rollouts(config, fleet, rewards)
        self.history = History(run_dir, time.perf_counter() if started is None else started)
        self.roles: Mapping[str, Role] = {}

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm of the first role."""
        return next(iter(self.roles.values())).algorithm

    @property
    def judges(self) -> bool:
        """Whether the base model judges held-out images: it compares their prompt with another one."""
        return self.config.judges and any(prompt.contrast for prompt in self.plan.held_out)

    # --- Extensions

    def notify(self, event: str, *arguments: Any) -> list[Any]:
        """Call the method `event` of all extensions and return their results."""
        return [getattr(extension, event)(self, *arguments) for extension in self.overriding(event).values()]

    def overriding(self, method: str) -> dict[str, Extension]:
        """Return the extensions that override `method`, by name."""
        plain = getattr(Extension, method)
        return {name: e for name, e in self.extensions.items() if getattr(type(e), method) is not plain}

    def add_extension(self, name: str, extension: Extension) -> None:
        """Let an extension join the run, as the last one."""
        self.extensions = {**{key: each for key, each in self.extensions.items() if key != name}, name: extension}

    # --- Parts of a step

    def prompted(self, number: int, prompts: Sequence[Prompt], held_out: bool = False) -> Sequence[Prompt]:
        """Return the prompts sampled in step `number`: `prompts`, unless an extension changes them."""
        for extension in self.overriding("prompted").values():
            prompts = extension.prompted(self, number, prompts, held_out)
        return prompts

    def sample(self, number: int, attempt: int = 0, begun: int = 0) -> PendingRollout:
        """Start sampling a round of step `number`, after `begun` tasks of others; images are scored as they arrive."""
        prompts = self.prompted(number, self.plan.prompts_of(number, attempt))
        return self.rollouts.start(self.plan.tasks(self.algorithm, self.state, prompts, number, attempt, begun))

    def finish(self, step: Step) -> None:
        """Mark the step as trained: `state` is now the state after it."""
        state, step.taken, self.rollouts.patience = self.state, True, REMINDER
        state.unlogged = step.metrics | step.watch.metrics
        state.step, state.algorithm = step.number, self.algorithm.state()
        state.extensions = {name: s for name, e in self.overriding("state").items() if (s := e.state()) is not None}

    def log(self, step: Step) -> None:
        """Write the row of metrics of a step."""
        if step.number:
            step.metrics |= step.watch.metrics
            if self.fleet.recovery is not None:
                step.metrics |= self.fleet.recovery.metrics()
            step.metrics |= {} if self.state.kl_coef is None else {"guard/kl_coef": self.state.kl_coef}
            step.metrics |= {"guard/rollbacks": float(len(self.state.returns))} if self.state.returns else {}
        self.history.add_row(step.number, step.metrics)
        self.state.unlogged = {}

    def picture(self, number: int, name: str, image: Image.Image) -> None:
        """Save an image as `samples/NAME_STEP.png`."""
        self.notify("pictured", number, name, self.history.picture(number, name, image), image)

    # --- State

    def set_roles(self, roles: Mapping[str, Role]) -> None:
        """Train these policies; the run's state is that of the first one."""
        self.roles = roles

    def flag(self, keys: Sequence[str]) -> None:
        """Set the signals of the guard, which stay until it judges again, which it may never."""
        self.state.signals = list(dict.fromkeys(keys))

    def set_kl_coef(self, coef: float | None) -> None:
        """Set the weight of the KL to `coef`; None: the value of the configuration."""
        self.state.kl_coef = coef
        self.algorithm.kl_coef = self.config.algorithm.kl_coef if coef is None else coef

    def restore(self, state: RunState) -> None:
        """Return to `state`, in algorithm and extensions; the workers' is restored by the fleet."""
        first = next(iter(self.roles.values()))
        self.state = first.update.state = state
        first.update.algorithm = build_algorithm(self.config)
        self.set_kl_coef(state.kl_coef)
        self.algorithm.load_state(state.algorithm)
        for name, extension in self.overriding("load_state").items():
            extension.load_state(state.extensions.get(name))

    def load(self, checkpoint: Checkpoint, returns: Sequence[int] | None = None) -> None:
        """Continue from `checkpoint`; raises `CheckpointError` if it belongs to another model, data or LoRA.

        returns: the steps to which the guard has taken the run back, by default those of the checkpoint.
        """
        check_identity(checkpoint, self.state.identity)
        state = RunState.of(checkpoint)
        # the weight raised by the guard stays, unless the run is resumed with another algorithm.kl_coef
        before = state.settings.get("algorithm", {}).get("kl_coef")
        raised = before == self.config.algorithm.kl_coef and self.config.guard.raises_kl
        coef = state.kl_coef if raised else None
        state = replace(state, identity=self.state.identity, settings=self.state.settings, kl_coef=coef)
        assert state.worker is not None
        try:
            self.restore(state if returns is None else replace(state, returns=list(returns)))
            self.fleet.load(checkpoint, state.worker)
        except CheckpointError as error:
            raise CheckpointError(
                f"{checkpoint.path} cannot be resumed: {error}; resume another one, or start a new run with "
                "checkpoint.resume=never"
            ) from None
        self.history.return_to(self.state)

    def open_log(self, kept: int | None = None) -> None:
        """Open the log of metrics after the current step; `kept`: the last step whose row stays."""
        if kept is None:
            # what is logged again is cut: the validation of step 0, and a step that was logged after it was saved
            kept = self.state.step - bool(self.state.unlogged) if self.state.step else -1
        self.history.open_log(kept)
        self.notify("starting")

    def save(self, process: int = 0, held: Held | None = None) -> None:
        """Write a checkpoint from `held` or `process`, remove old ones; full fine-tuning waits for the last only."""
        step, total, root = self.state.step, self.plan.last_step, self.run_dir / "checkpoints"
        writer, history = self.fleet.writer, self.history
        with signals.deferred(), waiting(f"saving the checkpoint of step {step}"), self.fleet.timeline.span("save"):
            writer.finish()
            held = held or self.fleet.hold(step, process)
            state = replace(
                self.state,
                finished=step == total and not self.state.unlogged,
                val_reward=history.reward if history.validated == step else None,
                val_metrics=history.metrics if history.validated == step else {},
                worker=held.numbers,
            )

            files, values = state.files, state.to_json()

            def write() -> None:
                save_checkpoint(root, step, files, values, held.write)
                prune(root, self.config.checkpoint.keep)

            writer.start(write, held.check, self.fleet.workers.hang_after)
            if held.at_once or step == total:
                writer.finish()
                self.notify("saved", step, root / f"step_{step}")
            history.saved = step

    def saved(self) -> bool:
        """Whether the last finished step has a checkpoint, or there is no step to save."""
        try:
            self.fleet.writer.finish()
        except (CheckpointError, ClusterError) as failed:  # the worker died; another one may hold the state
            logger.warning("%s", failed)
            self.history.saved = None
        return self.state.step in (0, self.history.saved)


def first_role(run: Run) -> Role:
    """Return the role whose configuration, fleet and counts are those of the run."""
    algorithm = build_algorithm(run.config)
    update = Update(run.config, algorithm, run.fleet, run.state, run.fleet.model.half_precision)
    if run.overriding("updating"):
        update.resets_reference = lambda step: any(run.notify("updating", step))
    if run.overriding("accumulating"):
        update.accumulated = lambda *arguments: _first_known(run.notify("accumulating", *arguments))
    return Role(POLICY, run.config, run.fleet, update)


def _first_known(results: Sequence[Any]) -> Any:
    return next((result for result in results if result is not None), None)


class Extension:
    """An optional part of a run: override the events it needs.

    A step calls the methods in the order of this class; `alerted`, `pictured` and `saved` are called at any time. To
    save a checkpoint, stop or roll back after a step, add a `Directive` to `step.directives` until its row is logged.
    """

    takes_gradients = False  # whether `credited` computes gradients on the workers

    def __init__(self, config: Config) -> None:
        self.config = config

    @classmethod
    def wanted(cls, config: Config) -> bool:
        """Whether a run with `config` needs it."""
        return True

    def assigning(self, run: Run, first: Role) -> Mapping[str, Role] | None:
        """The model is loaded; return the roles of the run, if it has others than `first`."""

    def starting(self, run: Run) -> None:
        """The run starts or has returned to an earlier step; its metrics end at `run.state.step`."""

    def stepping(self, run: Run) -> None:
        """The next step is about to begin."""

    def prompted(self, run: Run, number: int, prompts: Sequence[Prompt], held_out: bool) -> Sequence[Prompt]:
        """The prompts of step `number` are chosen; return those to sample."""
        return prompts

    def scoring(self, run: Run, step: Step, rollout: PendingRollout) -> Callable[[], None] | None:
        """A rollout is sampled; return what is to be called while its scores arrive, if anything is."""

    def scored(self, run: Run, step: Step) -> PendingRollout | None:
        """A round of images is scored; return the next one, if the step has another."""
        return None

    def rewarded(self, run: Run, step: Step) -> None:
        """`step.rewards` is known; the credit follows from it."""

    def credited(self, run: Run, step: Step) -> None:
        """`step.credit` is known; the update follows from it."""

    def accumulating(self, run: Run, step: Step, credit: PackedTensors, pairs: int, kl: KLWeight) -> UpdateStats | None:
        """The first gradient is about to be accumulated; return its statistics if it is accumulated already."""

    def updating(self, run: Run, step: Step) -> bool:
        """The last optimizer step is about to be taken; True moves the reference of the KL to the weights after it."""
        return False

    def updated(self, run: Run, step: Step) -> None:
        """The update is finished; metrics added to `step.metrics` are logged with the step."""

    def due(self, run: Run, step: Step) -> bool:
        """Whether to validate after `step`, besides every `validation.every` steps."""
        return False

    def continued(self, run: Run, step: Step, scores: Scores, images: Sequence[Pending[Images]]) -> HeldOut | None:
        """Held-out images are scored; return what is sampled from them before the validation ends, if anything is."""
        return None

    def validated(self, run: Run, step: Step) -> None:
        """The held-out prompts are sampled and scored: `step.validation`."""

    def looked(self, run: Run, step: Step) -> bool:
        """Some held-out images are sampled and judged by the base model: `step.look`; True asks for more of them."""
        return False

    def logged(self, run: Run, step: Step) -> None:
        """The row of metrics is written: `run.history.latest`."""

    def concluded(self, run: Run, step: Step) -> None:
        """The step is over; its checkpoint is saved if it was due."""

    def returning(self, run: Run) -> None:
        """The run is about to return to an earlier step; `starting` follows."""

    def rolled_back(self, run: Run, directive: RollBack) -> None:
        """The run has returned to an earlier step because of a `RollBack`."""

    def ended(self, run: Run, error: BaseException | None) -> None:
        """The run is over; `error`: why, if it did not finish."""

    def alerted(self, run: Run, step: int, sentence: str) -> None:
        """A warning about the run was logged."""

    def pictured(self, run: Run, step: int, name: str, path: Path, image: Image.Image) -> None:
        """A sheet of images was saved."""

    def saved(self, run: Run, step: int, folder: Path) -> None:
        """The checkpoint of `step` was written into `folder`."""

    def state(self) -> Any:
        """Return the state a resumed run needs, as JSON, or as bytes of a safetensors file; None: no state."""

    def load_state(self, state: Any) -> None:
        """Restore what `state` returned."""
