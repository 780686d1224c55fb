"""A run that lasts: its workers and its state, saved, resumed, and brought back when a worker dies."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import NoReturn, TypeVar

from gerl.algorithms import Algorithm, build_algorithm
from gerl.cluster import AGAIN, Cluster, WorkerGroup, rescuing, wait_all
from gerl.commandline import signals
from gerl.commandline.waiting import waiting
from gerl.config import Config
from gerl.config.changes import settings_of
from gerl.errors import CheckpointError, ClusterError, ModelError, RayDied
from gerl.model.hub import Downloads
from gerl.protocol import ModelFacts
from gerl.run.checkpoint import Checkpoint, best_checkpoint, checkpoint_paths, load_checkpoint, prune, save_checkpoint
from gerl.run.health import Health
from gerl.run.state import RunState, WorkerState
from gerl.run.tracking import Tracker, read_metrics
from gerl.timeline import Timeline
from gerl.trainer.control import Control
from gerl.trainer.folder import check_identity, set_aside
from gerl.trainer.held_out import HeldOut
from gerl.trainer.live import Onlookers
from gerl.trainer.recovery import NoRoom, Recovery, Roles, WentBack
from gerl.trainer.rescue import save_from_any, say_how_to_go_on
from gerl.trainer.saving import Saving, ask, fill, hold, writers
from gerl.workers.hybrid import HybridWorker, State

logger = logging.getLogger(__name__)
STARTING = 600.0  # seconds, at least, for a worker to start, or to load the model from a slow disk
R = TypeVar("R")  # what a part of a step returns
LOSSES = (ClusterError, ModelError, RuntimeError)  # what calls raise when a worker, or one that another misses, is gone


class DurableRun:
    """The workers of a run and its state at the last finished step, which survives them.

    A subclass starts the workers, trains, and sets `state` when a step is finished.
    """

    def __init__(self, config: Config, run_dir: Path, cluster: Cluster, identity: dict[str, str]) -> None:
        self.config, self.run_dir, self.cluster = config, run_dir, cluster
        self.algorithm: Algorithm = build_algorithm(config)
        self.state = RunState(identity=identity, settings=settings_of(config))
        self.val_reward: float | None = None  # of the last validation, after step `validated_step`
        self.validated_step: int | None = None
        self.saved_step: int | None = None
        self.downloads = Downloads()  # of the scorers' models, too
        self.saving = Saving()
        self.control = Control(run_dir)
        self.timeline = Timeline()
        self.starting = max(STARTING, config.cluster.hang_after)  # seconds without a word of workers that start
        self.sent = 0  # the step of which the weights are that workers draw with that do nothing else
        self.workers: WorkerGroup[HybridWorker]
        self.roles: Roles
        self.recovery: Recovery
        self.model: ModelFacts
        self.tracker: Tracker
        self.onlookers: Onlookers
        self.health: Health
        self.validations: HeldOut

    def check_model(self) -> None:
        """Let the workers find out what can be known of the model before they load it; in process `run` did."""
        self.roles = Roles.of(self.workers, self.cluster)
        self.recovery = Recovery(self.config, self.roles)
        if not self.workers.remote:
            return
        with waiting(f"checking {self.config.model.path}", self.downloads):
            calls = [self.workers.submit(i, HybridWorker.check, self.cluster.joined) for i in range(len(self.workers))]
            try:
                # the others only import what loads it
                wait_all(calls if self.cluster.joined else calls[:1], self.starting, self.downloads)
            except ClusterError as error:
                self.recovery.restart(self.lost(error))  # what is wrong with the model shows when it is loaded

    def load_model(self) -> ModelFacts:
        """Let the workers meet and load the model; those that die meanwhile are replaced."""
        while True:
            try:
                return self.set_up(range(len(self.workers)))[0]
            except LOSSES as error:
                self.recovery.restart(self.lost(error))

    def set_up(self, new: Sequence[int]) -> list[ModelFacts]:
        """All workers meet, and those that are `new` load the model; a download may take however long it needs."""
        count = len(self.workers)
        if count > 1 and self.workers.remote:
            with waiting(f"starting {count} processes, which have to meet"):
                self.roles.meet(self.config.lockstep, self.starting)
        loading = waiting(f"loading {self.config.model.path} on {len(new)} process(es)", self.downloads)
        with loading, self.timeline.span("load"):
            calls = [self.workers.submit(i, HybridWorker.setup, self.workers.remote) for i in new]
            return wait_all(calls, self.starting, self.downloads)

    def open_log(self, kept: int | None = None) -> None:
        """Carry the run's record on from the step at which it is; `kept`: the last one whose row stays."""
        if kept is None:
            # what is logged again is cut: the validation of step 0, and a step that was logged after it was saved
            kept = self.state.step - bool(self.state.unlogged) if self.state.step else -1
        self.tracker = Tracker(self.run_dir, self.config.logger, start_step=kept)
        self.health = Health(asdict(self.config))
        self.onlookers = Onlookers(self.run_dir, self.config.logger.live)
        for row in read_metrics(self.run_dir / "metrics.jsonl"):  # of the run that is carried on
            self.health.observe(row)
        self.validations = HeldOut(self.config, self.tracker, self.state.step, self.val_reward)

    # --- when workers die

    def undisturbed(self, part: Callable[[], R]) -> R:
        """Do a part of a step; where workers die, again, with others in their place.

        Raises `WentBack` if that is possible from an earlier step only.
        """
        while True:
            step, started = self.state.step, time.perf_counter()
            try:
                return part()
            except LOSSES as error:
                self.recover(error)
                self.recovery.seconds += time.perf_counter() - started
            if self.state.step != step:
                raise WentBack

    def recover(self, error: Exception) -> None:
        """Replace the workers that died; raises `error` if none did, or if there were too many."""
        state: State | None = None  # once one has given it: those that live may be new themselves the next time
        while True:
            lost = self.lost(error)
            with waiting(f"replacing {len(lost)} process(es)"):
                try:
                    self.abandon()
                    state = state or self.state_without(lost)
                    self.bring_together(self.recovery.restart(lost), state)
                    return
                except NoRoom:
                    raise
                except LOSSES as another:  # of one more that died
                    error = another

    def abandon(self) -> None:
        """Give up what was begun of the steps that are not finished."""

    def lost(self, error: Exception) -> list[int]:
        """The workers because of which `error` came; raises it if it has another reason, or if they are too many.

        Those are all where Ray itself died, if this run started it: another one is there then.
        """
        try:
            lost = self.recovery.lost(error)
        except RayDied as died:
            lost, error = [], died
        gone = isinstance(error, RayDied) and self.cluster.own
        if gone:
            lost = list(range(len(self.workers)))
        if not lost:
            raise error
        self.recovery.allow(lost, error, deaths=1 if gone else len(lost))
        why = str(error).removesuffix(f"; {AGAIN}")  # nobody has to
        logger.warning("%s; continuing from step %d with %d new process(es)", why, self.state.step, len(lost))
        if gone:
            self.start_ray_anew(error)
            lost = list(range(len(self.workers)))
        return lost

    def start_ray_anew(self, error: Exception) -> None:
        """Start Ray once more after it died by `error`; the workers are then to be started, by `Recovery.restart`."""
        self.saved()  # what is written of a checkpoint ends
        self.abandon()
        self.recovery.forget_workers()
        with waiting("restarting Ray"):
            self.cluster.start_anew(error)
        self.workers.forget()

    def state_without(self, lost: Sequence[int]) -> State | None:
        """The workers' state at the last finished step, from others than `lost`; None if there is a checkpoint of it.

        That of trained weights is saved for it.
        """
        if self.config.model.train == "lora":
            return self.recovery.state(self.state.step, lost)
        if not self.saved():
            for worker in range(len(self.roles.training)):
                if not set(writers(self.config, worker)) & set(lost):
                    self.save(worker)
                    self.saving.finish()
                    break
        return None

    def bring_together(self, new: Sequence[int], state: State | None) -> None:
        """Set the workers `new` up, and give all of them `state`, or that of the newest checkpoint there is."""
        self.set_up(new)
        if state is not None:
            self.restore(*state)
            self.send_weights(earlier=True)
            self.algorithm.load_state(self.state.algorithm)
            return
        before, root = self.state.step, self.run_dir / "checkpoints"
        checkpoint = next((c for path in reversed(checkpoint_paths(root)) if (c := _intact(path))), None)
        if checkpoint is not None:
            self.load(checkpoint)
        else:
            self.begin()
        if self.state.step < before:
            logger.warning("no worker is left that has step %d: returning to step %d", before, self.state.step)
            self.tracker.close()
            rows = read_metrics(self.run_dir / "metrics.jsonl")
            self.recovery.count_again(row for row in rows if row["step"] > self.state.step)
            self.open_log()

    def restore(self, files: Mapping[str, bytes], numbers: WorkerState) -> None:
        """Let all that train continue from the checkpoint of the last finished step."""
        given = files["state.safetensors"], numbers, self.state.step
        self.roles.training.run(HybridWorker.load_checkpoint, *given)

    def begin(self) -> None:
        """Go back to the begin of the run."""
        if len(self.workers) > 1:
            self.set_up(self.recovery.restart(range(len(self.workers))))
        self.sent = 0  # all begin with the same
        self.algorithm = build_algorithm(self.config)
        self.state = RunState(identity=self.state.identity, settings=self.state.settings)

    def send_weights(self, earlier: bool = False) -> None:
        """Give workers that only draw the weights of the last finished step, unless they have them.

        `earlier`: in any case, with the weights of earlier steps, for steps that were drawn ahead and are drawn anew.
        """
        training, drawing = self.roles.training, self.roles.drawing
        if self.config.cluster.layout == "hybrid" or (self.sent == self.state.step and not earlier):
            return
        # of divided weights each rank has a part, that of the same rank elsewhere
        ranks = self.config.cluster.ranks_per_worker if self.config.model.train != "lora" else 1
        weights = [training.submit(rank, HybridWorker.weights, earlier).later() for rank in range(ranks)]
        calls = [drawing.submit(i, HybridWorker.follow, weights[i % ranks]) for i in range(len(drawing))]
        wait_all(calls, drawing.hang_after)
        self.sent = self.state.step

    # --- what the guard does

    def kept_kl(self, state: RunState) -> float | None:
        """The weight of the KL that the guard had raised in `state`; None where it no longer holds.

        That is where the guard does not raise it any more, or the run goes on with another `algorithm.kl_coef`.
        """
        before = state.settings.get("algorithm", {}).get("kl_coef")
        same = before == self.config.algorithm.kl_coef and self.config.guard.raises_kl
        return state.kl_coef if same else None

    def weigh_kl(self, coef: float | None) -> None:
        """Let the KL count by `coef` from here on; None: as the configuration has it."""
        self.state.kl_coef = coef
        self.algorithm.kl_coef = self.config.algorithm.kl_coef if coef is None else coef

    def raise_kl(self) -> None:
        """Raise the weight of the KL, if it is not at its largest."""
        before, coef = self.algorithm.kl_coef, self.config.guard.raised(self.algorithm.kl_coef)
        self.weigh_kl(coef)
        if coef > before:
            logger.warning("step %d: guard: the weight of the KL changes from %g to %g", self.state.step, before, coef)
        else:
            logger.warning("step %d: guard: the weight of the KL stays at %g (guard.kl_most)", self.state.step, before)

    def guard_metrics(self) -> dict[str, float]:
        """The weight of the KL in the last step, where it was raised, and how often the run went back, if it did."""
        metrics = {} if self.state.kl_coef is None else {"guard/kl_coef": self.state.kl_coef}
        return metrics | ({"guard/rollbacks": float(self.state.rollbacks)} if self.state.rollbacks else {})

    def go_back(self) -> NoReturn:
        """Go on from the best checkpoint before the signals of the last validation, with a KL of more weight.

        Raises `WentBack`, or `GuardError` if there is no such checkpoint, or the run went back too often.
        """
        guard, fired, step = self.config.guard, self.validations.fired, self.state.step
        self.saving.finish()
        checkpoint = best_checkpoint(self.run_dir / "checkpoints", before=step)
        if checkpoint is None:
            raise self.validations.ended("there is no earlier checkpoint with a held-out reward; ")
        if self.state.rollbacks >= guard.rollbacks:
            raise self.validations.ended(f"it has already rolled back guard.rollbacks={guard.rollbacks} times; ")
        times, coef = self.state.rollbacks + 1, guard.raised(self.algorithm.kl_coef)
        with signals.deferred(), waiting(f"rolling back to step {checkpoint.step}"):
            self.abandon()
            self.workers.run(HybridWorker.forget)
            self.load(checkpoint)
            self.state.rollbacks = times
            self.weigh_kl(coef)
            self.save()  # that it went back: from here on a resumed run knows it
            self.saving.finish()
            set_aside(self.run_dir, checkpoint.step, drawn_too=True)
            self.tracker.close()
            self.open_log(kept=self.state.step - bool(self.state.unlogged))
            sentence = self.validations.guard.went_back(self.state.step, fired, coef)
            logger.warning("step %d: guard: %s", self.state.step, sentence)
            self.tracker.alert(self.state.step, sentence)
            self.recovery.remember(self.state.step, self.model.trained_parameters)
        raise WentBack

    # --- checkpoints

    def saved(self) -> bool:
        """Whether there is a checkpoint of the last finished step, or nothing that could be saved."""
        try:
            self.saving.finish()
        except (CheckpointError, ClusterError) as failed:  # of a worker that died, say; another one may have the state
            logger.warning("%s", failed)
            self.saved_step = None
        return self.state.step in (0, self.saved_step)

    def save(self, worker: int = 0, kept: State | None = None) -> None:
        """Write a checkpoint of the last finished step, `kept` or as `worker` has it; remove those no longer wanted.

        That of a LoRA is there on return. Trained weights are written while the next steps are trained, the last one is
        waited for.
        """
        step, total, root = self.state.step, self.config.trainer.steps, self.run_dir / "checkpoints"
        with signals.deferred(), waiting(f"saving the checkpoint of step {step}"), self.timeline.span("save"):
            self.saving.finish()
            files, members = dict[str, bytes](), writers(self.config, worker)
            if self.config.model.train == "lora":
                files, numbers = kept or self.workers.submit(worker, HybridWorker.finished, step).result()
            else:
                numbers = hold(self.workers, members, step)
            state = replace(
                self.state,
                finished=step == total and not self.state.unlogged,
                val_reward=self.val_reward if self.validated_step == step else None,
                worker=numbers,
            ).to_json()

            def write(**more: Callable[[Path], None]) -> None:
                save_checkpoint(root, step, files, state, **more)
                prune(root, self.config.checkpoint.keep)

            if self.config.model.train == "lora":
                write()
                self.tracker.checkpoint(step, files)
            else:
                written = partial(write, fill=partial(fill, self.workers, members))
                self.saving.start(written, partial(ask, self.workers, members), self.workers.hang_after)
            if step == total:
                self.saving.finish()
            self.saved_step = step

    def rescue(self, error: BaseException) -> None:
        """Save the last finished step of a run that `error` ends, and add to `error` how to carry on."""
        signals.answered()

        def save(worker: int) -> None:
            self.save(worker)
            self.saving.finish()

        with rescuing():
            failure = "" if self.saved() else "all workers are gone"
            if failure and self.cluster.alive:
                failure = save_from_any(self.roles.training, save)
            if failure and (kept := self.recovery.kept(self.state.step)):
                self.save(kept=kept)
                failure = ""
        say_how_to_go_on(error, self.run_dir, self.config.trainer.steps, self.state.step, failure)

    def load(self, checkpoint: Checkpoint) -> None:
        """Continue from `checkpoint`; raises `CheckpointError` if it belongs to another model, data or LoRA."""
        check_identity(checkpoint, self.state.identity)
        state = RunState.of(checkpoint)
        coef = self.kept_kl(state)
        self.state = replace(state, identity=self.state.identity, settings=self.state.settings, kl_coef=coef)
        self.weigh_kl(coef)
        assert state.worker is not None
        try:
            self.algorithm.load_state(state.algorithm)
            if self.config.model.train != "lora":
                self.roles.training.run(HybridWorker.load_state, checkpoint.path.resolve(), state.worker, state.step)
            else:
                self.restore({name: checkpoint.read(name) for name in ("state.safetensors",)}, state.worker)
            self.send_weights(earlier=True)
        except CheckpointError as error:
            raise CheckpointError(
                f"{checkpoint.path} cannot be resumed: {error}; resume another one, or start a new run with "
                "checkpoint.resume=never"
            ) from None
        self.val_reward, self.validated_step = self.state.val_reward, self.state.step
        self.saved_step = self.state.step


def _intact(path: Path) -> Checkpoint | None:
    try:
        return load_checkpoint(path)
    except CheckpointError:
        return None
