"""The training loop: plan, sample, score, credit, update, conclude.

    prompts --plan--> tasks --Fleet.sample--> images --RewardManager--> scores --credit--> credit [B, T]
                        |                                                                       |
              trajectories stay on the workers ------------------Fleet.accumulate, step--------+--> metrics, new weights

A `Step` is the value that moves through it. A fleet is all the processes that hold the model (`gerl.workers.fleet`),
and the reward manager those of the scorers. Everything optional is an extension (`gerl.trainer.extensions`).
"""

import logging
import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from PIL import Image

from gerl.algorithms import Algorithm, build_algorithm
from gerl.algorithms.planning import (
    MixtureSchedule,
    PromptSchedule,
    plan_images,
    plan_prompts,
    plan_samples,
    planned_steps,
    prompt_schedule,
)
from gerl.cluster import Cluster, Pending
from gerl.commandline import signals
from gerl.config import Config
from gerl.config.changes import settings_of
from gerl.config.configuration import saving_notes
from gerl.data.tables import unused_columns
from gerl.errors import CheckpointError, ClusterError
from gerl.model.hub import Downloads
from gerl.progress import MOMENT, REMINDER, Stopwatch, Timeline, waiting
from gerl.protocol import ModelFacts, Prompt, RolloutTask
from gerl.rewards.checks import check_held_out_metrics
from gerl.rewards.gradients import with_absolute_paths
from gerl.rewards.manager import RewardManager, functions_of
from gerl.rewards.rollouts import PendingRollout, serve_in_background
from gerl.rewards.scorers.weights import offers
from gerl.rewards.total import describe_reward
from gerl.rewards.trial import try_scorers
from gerl.run.checkpoint import Checkpoint, RunState, save_checkpoint
from gerl.run.choice import prune
from gerl.run.guard import FEWEST, fewest_changes, guard_scope, look_steps, watched_columns
from gerl.run.tracking import MetricsLog
from gerl.run.validation import Estimate, Validation
from gerl.trainer.early import EarlyGradient
from gerl.trainer.extensions import Extension, RollBack, Save, Stop, build_extensions
from gerl.trainer.overlong import without_overlong
from gerl.trainer.recovery import LOSSES, add_resume_notes, recover, rejoin, restart_lost, roll_back, save_last_step
from gerl.trainer.run_folder import RunFolder, check_identity
from gerl.trainer.step import Metrics, Step, credit_of, usable_rewards
from gerl.trainer.update import Update
from gerl.trainer.validation import look, validate
from gerl.workers.fleet import CheckpointWriter, Held, LocalFleet, fleet_of
from gerl.workers.roles import RoleWorker
from gerl.workers.worker import PolicyWorker

logger = logging.getLogger(__name__)
ID_STRIDE = 1_000_000  # between the task ids of steps sampled concurrently


def train(run: "Run") -> Generator[Step]:
    """Train from the last finished step to the last one; yields each concluded step.

    If workers die during a step, they are replaced and the step is repeated, bit for bit.
    """
    for step in run.steps():
        if (step.taken or run.survives(take, step)) and conclude(run, step):
            yield step


def take(run: "Run", step: Step) -> None:
    """Sample, score and update; afterwards `run.state` is the state after `step`."""
    run.begin(step)
    with step.watch("step"):
        run.sync(step)
        rollout: PendingRollout | None = run.sample(step.number)
        while rollout is not None:  # once, unless an extension has more to sample
            run.wait_until_sampled(rollout, step)
            run.score(rollout, step)
            rollout = run.further(step)
        learn(run, step)
    run.remember()


def learn(run: "Run", step: Step) -> None:
    """Credit the scored samples of a step and train on them."""
    run.fleet.sampled(step.number)
    step.rewards, step.metrics = usable_rewards(run.config, step.scores)
    run.notify("rewarded", step)
    step.credit = credit_of(run.config, run.algorithm, step.scores, step.rewards)
    run.notify("credited", step)
    step.images.clear()  # frees trajectories before the step ends
    with signals.deferred():
        step.metrics |= run.rewards.metrics() | run.train_on(step)
        run.notify("updated", step)
        run.finish(step)


def conclude(run: "Run", step: Step) -> bool:
    """Validate, log and save as due; returns False if the run has returned to an earlier step."""
    wanted = any(run.notify("due", step)) and run.held_out
    whole = wanted or run.validation_due(step.number)
    if whole or step.number in run.look_steps:
        with step.watch("step"):
            observed = run.survives(validate if whole else look, step)
        if not observed:
            return False
    with signals.deferred():
        run.log(step)
        run.notify("logged", step)
    run.writer.poll()
    for directive in step.directives:
        if isinstance(directive, RollBack):
            roll_back(run, directive)
            return False
    regular = step.number > 0 and due(step.number, run.config.checkpoint.every, run.last_step)
    if (regular or Save() in step.directives) and not run.survives(lambda run, step: run.save(), step):
        return False
    for directive in step.directives:
        if isinstance(directive, Stop):
            raise directive.error
    run.notify("concluded", step)
    return True


def train_ahead(run: "Run") -> Generator[Step]:
    """Train as `train` does, with the next `trainer.staleness` steps sampled before a step is scored and trained on."""
    for step in run.steps():
        if (step.taken or run.survives(take_ahead, step)) and conclude(run, step):
            yield step


def take_ahead(run: "Run", step: Step) -> None:
    """Take a step sampled with the weights of `step.lag` steps ago (off-policy lag); samplers and scorers stay busy."""
    run.begin(step)
    step.lag = min(run.config.trainer.staleness, run.state.step)
    last = min(step.number + run.config.trainer.staleness, run.last_step)
    with step.watch("step"):
        run.sync(step)
        for number in range(step.number, last + 1):
            if number not in run.ahead:
                run.ahead[number] = run.sample(number)
            if number == step.number or run.config.cluster.layout == "hybrid":
                run.wait_until_sampled(run.ahead[number], step)
        run.score(run.ahead.pop(step.number), step)
        while (rollout := run.further(step)) is not None:
            run.wait_until_sampled(rollout, step)
            run.score(rollout, step)
        learn(run, step)
    run.remember()


class Run:
    """A run's processes and its state after the last finished step; the driver holds no model and moves only images."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        cluster: Cluster,
        prompts: Sequence[Prompt],
        held_out: Sequence[Prompt],
        identity: dict[str, str],
        dataset_images: Sequence[Prompt] = (),
    ) -> None:
        """`identity`: digests of the prompts by key. `dataset_images`: the prompts of `data.regularise`."""
        self.config, self.run_dir, self.cluster = config, run_dir, cluster
        self.prompts, self.held_out = prompts, held_out[: config.validation.max_prompts]
        self.dataset_images = dataset_images
        self.algorithm: Algorithm = build_algorithm(config)
        self.state = RunState(identity=identity, settings=settings_of(config))
        self.planned_steps = self.last_step = planned_steps(config, prompts)  # an extension may end the run sooner
        self.started = time.perf_counter()
        self.extensions = build_extensions(config)
        self.ahead: dict[int, PendingRollout] = {}  # by step: sampled or in flight, not yet trained on
        self.latest: Metrics = {}  # the last row of metrics
        self.val_reward: float | None = None  # of the last validation; None: a score is missing
        self.val_metrics: Metrics = {}  # of the last validation, those that are finite
        self.val_gain: Estimate | None = None  # gain of the held-out reward over the first validation
        self.look_steps: Collection[int] = ()  # after which the guard looks at some held-out images
        self.validated_step: int | None = None
        self.first_validation: Validation | None = None
        self.saved_step: int | None = None
        self.log_start = -1  # the last step whose row of metrics was kept when the log was opened
        self.patience = MOMENT  # seconds of a step without a line of the log: the first one is announced
        self.downloads = Downloads()  # includes the scorers' models
        self.writer = CheckpointWriter()
        self.timeline = Timeline()
        self.fleet: LocalFleet
        self.rewards: RewardManager
        self.update: Update
        self.model: ModelFacts
        self.schedule: PromptSchedule | MixtureSchedule
        self.metrics_log: MetricsLog

    def train(self, resume: RunFolder | None = None) -> Generator[Step]:
        """Set up the run and train, from the checkpoint to resume if any; the last finished step is always saved."""
        self.setup(resume)
        error: BaseException | None = None
        try:
            yield from (train_ahead if self.config.trainer.staleness else train)(self)
        except BaseException as raised:
            error = raised
            self.rescue(raised)
            raise
        finally:
            if self.fleet.recovery is not None:
                self.fleet.recovery.close()
            self.notify("ended", error)
            self.metrics_log.close()

    def fit(self, resume: RunFolder | None = None) -> None:
        """Train without yielding the steps."""
        for _ in self.train(resume):
            pass

    def notify(self, event: str, *arguments: Any) -> list[Any]:
        """Call the method `event` of all extensions and return their results."""
        return [getattr(extension, event)(self, *arguments) for extension in self.overriding(event).values()]

    def overriding(self, method: str) -> dict[str, Extension]:
        """Return the extensions that override `method`, by name."""
        plain = getattr(Extension, method)
        return {name: e for name, e in self.extensions.items() if getattr(type(e), method) is not plain}

    # --- start

    def setup(self, resume: RunFolder | None) -> None:
        """Start the workers and load the model and the checkpoint, if any."""
        checkpoint = None if resume is None else resume.checkpoint
        self.start(checkpoint)
        if checkpoint is not None:
            self.load(checkpoint)
        if resume is not None:
            resume.resume_run()
        self.update = Update(self.config, self.algorithm, self.fleet, self.state, self.model.half_precision)
        if self.overriding("updating"):
            self.update.resets_reference = lambda step: any(self.notify("updating", step))
        self.calibrate()
        self.open_log()
        self.remember()

    def start(self, checkpoint: Checkpoint | None = None) -> None:
        """Start the workers, check the model, try the scorers and load the model that `checkpoint` needs."""
        config, cluster = self.config, self.cluster
        self.state.step = checkpoint.step if checkpoint else 0  # named in the message of a request to stop
        self.notify("stepping")
        name = "/".join(self.run_dir.absolute().parts[-2:])
        logger.info("reward: %s", describe_reward(config.reward.scorers))
        # before the scorers, which share GPUs: Ray packs these, and would leave no room for a worker
        self.fleet = self.start_fleet(checkpoint)
        self.rewards = RewardManager(config.reward, cluster, name, self.timeline)
        loading: list[Pending[ModelFacts]] = []
        try:
            self.fleet.check_model(self.downloads)
            if cluster.remote:  # in the background, while the scorers start
                loading = self.fleet.begin_loading(range(len(self.fleet.workers)))
        except (ClusterError, RuntimeError) as error:  # of a worker that died, or of its peers while they join
            restart_lost(self, error)
        with waiting("trying the scorers on grey images", self.downloads):
            sampled = self.prompts if config.data.train_on == "rollouts" else self.held_out
            columns = try_scorers(self.rewards, config, sampled, self.held_out)
        check_held_out_metrics(config, self.held_out, columns)
        self.describe_guard(columns)
        self.notify("stepping")
        self.model = self.load_model(loading)
        self.describe()
        self.state.identity |= {"model.path": self.model.weights}
        ranks = cluster.ranks if config.lockstep else 1
        self.prompts, self.held_out = without_overlong(config, self.fleet, ranks, self.prompts, self.held_out)
        self.schedule = prompt_schedule(config, self.prompts)
        self.planned_steps = self.last_step = planned_steps(config, self.prompts)  # without prompts that were dropped

    def describe_guard(self, columns: Sequence[str]) -> None:
        """Log what the guard sees, and scorers to watch if there is none; `columns`: those known from the trial."""
        action, scored = self.config.guard.action, self.rewards.validation
        judge = self.config.judges and any(prompt.contrast for prompt in self.held_out)
        if judge and len(self.held_out) >= FEWEST and not self.config.episode.turns:
            self.look_steps = look_steps(self.planned_steps, self.config.validation.every)
        if scored and not any(scorer.weight for scorer in scored.values()):
            return  # people vote, or images are imitated: without a held-out reward nothing is compared with it
        known = [c for name in scored for c in (name, *(c for c in columns if c.startswith(f"{name}/")))]
        watched = watched_columns(asdict(self.config), known)
        fewest = fewest_changes(asdict(self.config), len(watched))
        logger.info("%s", guard_scope(watched, action, len(self.held_out), judge, fewest, self.look_steps))
        gpu = self.cluster.remote and self.cluster.device == "cuda"
        if not watched and action != "off" and self.held_out and (offered := offers(self.held_out, gpu)):
            logger.info("scorers that can be watched without a download: %s", " or ".join(offered))

    def start_fleet(self, checkpoint: Checkpoint | None) -> LocalFleet:
        """Start the workers without loading the model."""
        config, cluster = self.config, self.cluster
        functions = functions_of(config.reward.scorers) if config.algorithm.needs.reward_gradient else {}
        cluster.send_by_value(functions.values())
        whole = trainer = with_absolute_paths(
            replace(config, model=config.model.for_resume()) if checkpoint else config
        )
        if cluster.training < cluster.processes and config.model.offload == "none":
            # trainers only call the denoiser: the other components stay in main memory
            trainer = replace(whole, model=replace(whole.model, offload="encoders"))
        total_updates, threads = self.planned_steps * config.actor.updates, cluster.threads

        def arguments(rank: int) -> tuple[object, ...]:
            own = trainer if rank < cluster.training else whole
            return own, rank, cluster.worker_device(rank), threads, total_updates, functions

        workers = cluster.workers(
            "worker",
            RoleWorker if config.episode.turns else PolicyWorker,
            cluster.processes,
            arguments,
            gpus=cluster.gpus,
            threads=threads,
            together=cluster.ranks,
        )
        return fleet_of(config, cluster, workers, self.timeline)

    def load_model(self, begun: list[Pending[ModelFacts]]) -> ModelFacts:
        """Load the model on all workers, or wait for the calls `begun` that do; replace workers that die meanwhile."""
        while True:
            try:
                return self.fleet.set_up(range(len(self.fleet.workers)), self.downloads, begun)[0]
            except LOSSES as error:
                restart_lost(self, error)
                begun = []

    def describe(self) -> None:
        """Log the loaded model and known problems of its kind."""
        config, cluster, model = self.config, self.cluster, self.model
        columns = unused_columns([*self.prompts, *self.held_out], config, model.arguments)
        for sentence in filter(None, [cluster.note, *model.notes, *saving_notes(config), *columns]):
            logger.info("%s", sentence)
        for sentence in model.warnings:
            logger.warning("%s", sentence)
        ranks = f" of {cluster.ranks} ranks" if cluster.ranks > 1 else ""
        what = "LoRA of %s parameters on" if config.model.train == "lora" else "%s trained weights of"
        roles = ""
        if config.cluster.layout == "split":
            training, sampling = config.cluster.roles(cluster.num_workers)
            roles = f" ({sampling} for sampling, {training} for training)"
        logger.info(
            f"%s, {what} %s; %d worker(s)%s on %s%s; %d prompts, %d steps per epoch",
            *(model.pipeline, f"{model.trained_parameters:,}", " and ".join(model.denoisers)),
            *(cluster.num_workers, ranks, cluster.device, roles, len(self.prompts)),
            prompt_schedule(config, self.prompts).steps_per_epoch,
        )

    def calibrate(self) -> None:
        """Measure the numerical noise of the on-policy ratio, and warn of settings that cannot work."""
        config, algorithm = self.config, self.algorithm
        if not algorithm.needs.ratio or config.algorithm.cfg == "off":
            return
        samples = plan_samples(config, plan_prompts(self.schedule, self.prompts, 1), 1, self.state.policy_version)
        task = Algorithm.plan(algorithm, samples)[0]
        with waiting(f"measuring the numerical noise of the ratio on {len(task.samples)} images"):
            self.update.calibrate(task, self.cluster.ranks if config.lockstep else 1)

    def open_log(self, kept: int | None = None) -> None:
        """Open the log of metrics after the current step; `kept`: the last step whose row stays."""
        if kept is None:
            # what is logged again is cut: the validation of step 0, and a step that was logged after it was saved
            kept = self.state.step - bool(self.state.unlogged) if self.state.step else -1
        self.log_start = kept
        self.metrics_log = MetricsLog(self.run_dir, start_step=kept)
        self.notify("starting")

    def reopen_log(self, kept: int | None = None) -> None:
        """Reopen the log after returning to an earlier step."""
        self.notify("returning")
        self.metrics_log.close()
        self.open_log(kept)

    # --- the parts of a step

    def steps(self) -> Iterator[Step]:
        """Iterate over the remaining steps; after a rollback from the earlier step again."""
        state = self.state
        self.notify("stepping")
        if state.step == 0 and self.held_out:
            yield Step(0, Stopwatch(self.timeline), taken=True)
        while self.state.step < self.last_step or self.state.unlogged:
            self.notify("stepping")
            watch = Stopwatch(self.timeline)
            if unlogged := self.state.unlogged:  # trained, but stopped before it was concluded
                yield Step(self.state.step, watch, taken=True, metrics=dict(unlogged))
            else:
                yield Step(self.state.step + 1, watch)

    def survives(self, part: Callable[["Run", Step], None], step: Step) -> bool:
        """Run `part`, again if workers die; returns False if the run has returned to an earlier step."""
        before = self.state.step
        while True:
            try:
                part(self, step)
                return True
            except LOSSES as error:
                recover(self, error)
            if self.state.step != before:
                return False
            step.restart()

    def plan(self, number: int, attempt: int = 0, begun: int = 0) -> list[RolloutTask]:
        """Plan the tasks of step `number` after the `begun` ones of earlier rounds, with ids unique in flight."""
        staleness = self.config.trainer.staleness
        prompts = self.prompted(number, plan_prompts(self.schedule, self.prompts, number, attempt))
        samples = plan_samples(self.config, prompts, number, self.state.policy_version)
        tasks = self.algorithm.plan(samples, first_id=begun + number % (staleness + 1) * ID_STRIDE)
        if self.dataset_images and attempt == 0:
            images = plan_samples(self.config, plan_images(self.config, self.dataset_images, number), number, 0)
            tasks += Algorithm.plan(self.algorithm, images, first_id=tasks[-1].id + 1)
        # sampled with the weights there were when the one before it was due, also before the run was resumed
        lag = max(0, self.state.step - max(0, number - 1 - staleness))
        return [replace(task, lag=lag) for task in tasks] if lag else tasks

    def prompted(self, number: int, prompts: Sequence[Prompt], held_out: bool = False) -> Sequence[Prompt]:
        """Return the prompts sampled in step `number`: `prompts`, unless an extension changes them."""
        for extension in self.overriding("prompted").values():
            prompts = extension.prompted(self, number, prompts, held_out)
        return prompts

    def sample(self, number: int, attempt: int = 0, begun: int = 0) -> PendingRollout:
        """Start sampling a round of step `number`; images are scored as they arrive."""
        return self.sample_tasks(self.plan(number, attempt, begun), self.fleet)

    def sample_tasks(self, tasks: Sequence[RolloutTask], fleet: LocalFleet) -> PendingRollout:
        """Start sampling `tasks` on `fleet`; images are scored as they arrive."""
        batches, ahead = [task.samples for task in tasks], self.config.trainer.staleness
        return PendingRollout(self.rewards, batches, fleet.sample(tasks), fleet.samplers.hang_after, ahead)

    def further(self, step: Step) -> PendingRollout | None:
        """Return the next rollout of a step whose earlier ones are scored; None: there is no other."""
        return next((rollout for rollout in self.notify("scored", step) if rollout is not None), None)

    @property
    def signals(self) -> list[str]:
        """Keys of the guard's signals when it last judged; they stay until it judges again, which it may never."""
        return self.state.signals

    @signals.setter
    def signals(self, keys: list[str]) -> None:
        self.state.signals = keys

    @property
    def sampled_ahead(self) -> list[PendingRollout]:
        """Return the rollouts of the steps after the one being trained."""
        return [rollout for _, rollout in sorted(self.ahead.items())]

    def begin(self, step: Step) -> None:
        """Let restarted workers join, once the cluster has room for them."""
        self.timeline.step = step.number
        recovery = self.fleet.recovery
        if recovery is not None:
            recovery.update_copy(self.state)
        if recovery is not None and (admitted := recovery.admit(ask=not self.rewards.wants_room)):
            rejoin(self, admitted)

    def sync(self, step: Step) -> None:
        """Sync the weights of the last finished step to dedicated samplers, after their current calls."""
        if self.fleet.samplers is self.fleet.trainers:
            return
        for rollout in self.sampled_ahead:
            self.wait_until_sampled(rollout, step)
        self.fleet.sync(self.state.step)

    def wait_until_sampled(self, rollout: PendingRollout, step: Step) -> None:
        """Wait until all images of a rollout are sampled; scoring continues meanwhile."""
        what = "sampling" if self.config.data.train_on == "rollouts" else "reading"
        said = f"{what} {rollout.total} images"
        with waiting(said, self.progress_of(rollout), self.patience), step.watch("rollout"):
            rollout.wait_until_sampled()

    def score(self, rollout: PendingRollout, step: Step) -> None:
        """Wait for the scores of a rollout and add both to the step."""
        said = f"scoring {rollout.total} images"
        step.early = EarlyGradient.of(self, rollout) if self.fleet.trainers.remote else None
        meanwhile = None if step.early is None else step.early.advance
        with waiting(said, self.progress_of(rollout), self.patience), step.watch("reward_wait"):
            found = rollout.finish(self.sampled_ahead, meanwhile)
        tasks = rollout.dispatch.finish()
        for task, scores in zip(tasks, found, strict=True):
            if not self.dataset_images or task.samples[0].dataset_image is None:
                step.scores.add(scores)
        step.images += rollout.images
        step.rounds, step.round = step.rounds + 1, tasks
        step.tasks += tasks

    def progress_of(self, rollout: PendingRollout) -> Callable[[], str]:
        """Describe the progress of sampling and of downloads."""
        return lambda: ", ".join(filter(None, (rollout.progress(), self.downloads())))

    def train_on(self, step: Step) -> Metrics:
        """Take the step's optimizer steps while samplers and scorers work on later steps."""
        what = "LoRA" if self.config.model.train == "lora" else "weights"
        self.update.state = self.state
        trained = self.timeline.span("update", *[f"worker {i}" for i in self.fleet.trainers.numbers])
        background = serve_in_background(self.rewards, self.sampled_ahead) if self.ahead else nullcontext()
        with background, waiting(f"updating the {what}", after=self.patience), step.watch("update"), trained:
            return self.update.run(step)

    def finish(self, step: Step) -> None:
        """Mark the step as trained: `run.state` is now the state after it."""
        state, step.taken, self.patience = self.state, True, REMINDER
        state.unlogged = step.metrics | step.watch.metrics
        state.step, state.algorithm = step.number, self.algorithm.state()
        state.extensions = {name: s for name, e in self.overriding("state").items() if (s := e.state()) is not None}

    def validation_due(self, number: int) -> bool:
        """Whether the held-out prompts are sampled after step `number`."""
        regular = number == 0 or due(number, self.config.validation.every, self.last_step)
        return bool(self.held_out) and regular

    # --- what is written

    def log(self, step: Step) -> None:
        """Write the row of metrics of a step."""
        if step.number:
            step.metrics |= step.watch.metrics
            if self.fleet.recovery is not None:
                step.metrics |= self.fleet.recovery.metrics()
            step.metrics |= {} if self.state.kl_coef is None else {"guard/kl_coef": self.state.kl_coef}
            step.metrics |= {"guard/rollbacks": float(len(self.state.returns))} if self.state.returns else {}
        self.metrics_log.log(step.number, step.metrics)
        self.latest, self.state.unlogged = step.metrics, {}

    def picture(self, step: int, name: str, image: Image.Image) -> None:
        """Save an image as `samples/NAME_STEP.png`."""
        self.notify("pictured", step, name, self.metrics_log.image(step, name, image), image)

    def alert(self, step: int, sentence: str) -> None:
        """Notify the extensions of a logged warning."""
        self.notify("alerted", step, sentence)

    def save(self, process: int = 0, held: Held | None = None) -> None:
        """Write a checkpoint from `held` or `process`, remove old ones; full fine-tuning waits for the last only."""
        step, total, root = self.state.step, self.last_step, self.run_dir / "checkpoints"
        with signals.deferred(), waiting(f"saving the checkpoint of step {step}"), self.timeline.span("save"):
            self.writer.finish()
            held = held or self.fleet.hold(step, process)
            state = replace(
                self.state,
                finished=step == total and not self.state.unlogged,
                val_reward=self.val_reward if self.validated_step == step else None,
                val_metrics=self.val_metrics if self.validated_step == step else {},
                worker=held.numbers,
            )

            files, values = state.files, state.to_json()

            def write() -> None:
                save_checkpoint(root, step, files, values, held.write)
                prune(root, self.config.checkpoint.keep)

            self.writer.start(write, held.check, self.fleet.workers.hang_after)
            if held.at_once or step == total:
                self.writer.finish()
                self.notify("saved", step, root / f"step_{step}")
            self.saved_step = step

    def saved(self) -> bool:
        """Whether the last finished step has a checkpoint, or there is no step to save."""
        try:
            self.writer.finish()
        except (CheckpointError, ClusterError) as failed:  # the worker died; another one may hold the state
            logger.warning("%s", failed)
            self.saved_step = None
        return self.state.step in (0, self.saved_step)

    def rescue(self, error: BaseException) -> None:
        """Save the last finished step when `error` ends the run, and add the command that resumes to `error`."""
        signals.answered()
        failure = save_last_step(self)
        add_resume_notes(error, self.run_dir, self.last_step, self.state.step, failure)

    # --- state

    def load(self, checkpoint: Checkpoint) -> None:
        """Continue from `checkpoint`; raises `CheckpointError` if it belongs to another model, data or LoRA."""
        check_identity(checkpoint, self.state.identity)
        state = RunState.of(checkpoint)
        # the weight raised by the guard stays, unless the run is resumed with another algorithm.kl_coef
        before = state.settings.get("algorithm", {}).get("kl_coef")
        raised = before == self.config.algorithm.kl_coef and self.config.guard.raises_kl
        coef = state.kl_coef if raised else None
        self.state = replace(state, identity=self.state.identity, settings=self.state.settings, kl_coef=coef)
        self.set_kl_coef(coef)
        assert state.worker is not None
        try:
            self.load_parts()
            self.fleet.load(checkpoint, state.worker)
        except CheckpointError as error:
            raise CheckpointError(
                f"{checkpoint.path} cannot be resumed: {error}; resume another one, or start a new run with "
                "checkpoint.resume=never"
            ) from None
        self.val_reward = self.state.val_reward
        self.val_metrics = self.state.val_metrics
        self.validated_step = self.state.step
        self.saved_step = self.state.step

    def load_parts(self) -> None:
        """Load the state of the last finished step into algorithm and extensions."""
        self.algorithm.load_state(self.state.algorithm)
        for name, extension in self.overriding("load_state").items():
            extension.load_state(self.state.extensions.get(name))

    def set_kl_coef(self, coef: float | None) -> None:
        """Set the weight of the KL to `coef`; None: the value of the configuration."""
        self.state.kl_coef = coef
        self.algorithm.kl_coef = self.config.algorithm.kl_coef if coef is None else coef

    def discard(self) -> None:
        """Discard images and scores of unfinished steps."""
        self.ahead.clear()
        self.fleet.discard()
        self.rewards.give_up()

    def remember(self) -> None:
        """Keep a copy of the state outside the workers, in case all of them die."""
        if self.fleet.recovery is not None:
            self.fleet.recovery.remember(self.state, self.model.trained_parameters)


def due(step: int, every: int, total: int) -> bool:
    return step == total or (every > 0 and step % every == 0)
