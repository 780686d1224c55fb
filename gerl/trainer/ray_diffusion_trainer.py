"""The training loop: draw and score, credit, train, log, validate, save."""

import contextlib
import logging
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from gerl.algorithms import Algorithm
from gerl.algorithms.planning import plan_images, plan_prompts, plan_samples, plan_validation, prompt_schedule
from gerl.algorithms.signal_checks import nearer_bound, probe_warnings
from gerl.cluster import Cluster, Pending
from gerl.commandline import signals
from gerl.commandline.waiting import MOMENT, REMINDER, waiting
from gerl.config import Config
from gerl.config.savings import saving_notes
from gerl.data.columns import unused_columns
from gerl.protocol import Images, Prompt, RolloutTask, Scores, StepEnd
from gerl.rewards.manager import RewardManager, given
from gerl.rewards.total import described
from gerl.rewards.trial import try_scorers
from gerl.run.checkpoint import Checkpoint
from gerl.run.progress import Progress
from gerl.run.timing import Stopwatch
from gerl.trainer.credit import Metrics, Scored, credit_step, scores_of
from gerl.trainer.drawing import Drawn, Rolled, end_drawing, roll_out
from gerl.trainer.durable import DurableRun
from gerl.trainer.folder import RunFolder
from gerl.trainer.held_out import HeldOut
from gerl.trainer.overlong import without_overlong
from gerl.trainer.owners import followers, share
from gerl.trainer.pictures import training_sheet
from gerl.trainer.recovery import WentBack
from gerl.trainer.rollouts import Rollouts, meanwhile
from gerl.trainer.update import Update
from gerl.workers.hybrid import HybridWorker, repeated
from gerl.workers.rewarding import with_scorers_found

logger = logging.getLogger(__name__)
APART = 1_000_000  # between the ids of micro-batches of steps that are on their way together
NO_CREDIT = 1e-6  # what rounding leaves of the credit of equal rewards


class RayDiffusionTrainer(DurableRun):
    """An algorithm over a cluster's workers; `fit` is the run. The driver holds no model and moves only images."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        cluster: Cluster,
        prompts: Sequence[Prompt],
        held_out: Sequence[Prompt],
        identity: dict[str, str],
    ) -> None:
        super().__init__(config, run_dir, cluster, identity)
        self.prompts, self.held_out = prompts, held_out[: config.validation.max_prompts]
        self.regularising: Sequence[Prompt] = ()  # with an image each, of files
        self.latest: Metrics = {}  # the last line of the metrics
        self.patience = MOMENT  # seconds of a step that pass without a line: the first one is announced
        self.ahead: dict[int, Rolled] = {}  # by step: drawn, or on its way, but not yet trained on
        self.drawn_ends: list[Pending[StepEnd]] = []  # of the step that is trained, from workers that only draw
        self.rewards: RewardManager
        self.update: Update
        self.validations: HeldOut

    def fit(self, resume: RunFolder | None = None) -> None:
        """Train to `trainer.steps`, from the checkpoint of `resume` if it has one.

        However it ends, the last finished step is saved.
        """
        for _ in self.each_step(resume):
            pass

    def each_step(self, resume: RunFolder | None = None) -> Generator[int]:
        """As `fit`, but yields the number of each step that is finished, and 0 after a validation before the first."""
        self.setup(resume)
        config, total = self.config, self.config.trainer.steps
        try:
            self.control.stop(self.state.step)  # asked for while the model was loaded
            if self.state.step == 0 and self.held_out:
                self.log(0, self.undisturbed(partial(self.validate, 0)))
                self.record()
                if config.guard.action == "rollback":
                    self.undisturbed(self.save)  # what it may go back to
                yield 0
            done = self.state.step - bool(self.state.unlogged)  # else the last step was stopped before its end
            with Progress(total, done, disable=not config.logger.progress) as progress:
                while self.state.step < total or self.state.unlogged:
                    self.control.stop(self.state.step)
                    progress.go_back(self.state.step - bool(self.state.unlogged))
                    with contextlib.suppress(WentBack):
                        watch = Stopwatch(self.timeline) if self.state.unlogged else self.undisturbed(self.take_step)
                        reward = self.state.unlogged.get("reward/mean")
                        self.conclude(watch)
                        self.record()
                        progress.update(values={"reward": reward, **self.validations.postfix()})
                        yield self.state.step
        except BaseException as error:
            self.rescue(error)
            raise
        finally:
            self.recovery.close()
            self.tracker.close()

    def take_step(self) -> Stopwatch:
        """Draw, score and train; returns what measures the step's time."""
        state, watch = self.state, Stopwatch(self.timeline)
        self.timeline.step = state.step + 1
        if new := self.recovery.take_in(ask=not self.rewards.wants_room):
            self.recovery.lost()
            self.abandon()
            self.bring_together(new, self.state_without(new))
        with watch("step"):
            drawn = self.draw(state.step + 1, watch)
            metrics, credit = self.credit(drawn, watch)
            self.onlookers.images(state.step + 1, drawn, credit)
            with signals.deferred():
                state.unlogged = metrics | self.train(drawn, credit, watch) | watch.metrics()
                state.step, state.algorithm = state.step + 1, self.algorithm.state()
        self.recovery.remember(state.step, self.model.trained_parameters)
        return watch

    def conclude(self, watch: Stopwatch) -> None:
        """End a step: validate, log its line, save."""
        state, total, guard = self.state, self.config.trainer.steps, self.config.guard
        self.patience = REMINDER
        self.validations.course.add({"step": state.step, **state.unlogged})
        asked = self.control.validate(state.step, bool(self.held_out))
        validated = asked or _due(state.step, self.config.validation.every, total)
        if validated:
            with watch("step"):
                found = self.undisturbed(partial(self.validate, state.step, watch))
            state.unlogged |= found
        with signals.deferred():
            row = {**state.unlogged, **watch.metrics(), **self.recovery.metrics()}
            self.log(state.step, row | self.guard_metrics())
            state.unlogged = {}
            if validated and self.validations.fired and guard.action == "kl":
                self.raise_kl()
        self.saving.check()
        for sentence in self.health.observe({"step": state.step, **row}):
            logger.warning("%s", sentence)
            self.tracker.alert(state.step, sentence)
        if validated and self.validations.fired and guard.action == "rollback":
            self.go_back()
        good = validated and guard.action == "rollback" and self.held_out  # what it may go back to
        if self.control.save(state.step) or _due(state.step, self.config.checkpoint.every, total) or good:
            self.undisturbed(self.save)
        self.validations.check()

    def log(self, step: int, row: Metrics) -> None:
        """Write a line of metrics."""
        self.tracker.log(step, row)
        self.latest = row

    def record(self) -> None:
        """Write what the workers did since the last time."""
        self.onlookers.spans(self.timeline.take())

    def setup(self, resume: RunFolder | None) -> None:
        """Start the workers and load the model and, where given, the checkpoint."""
        config, checkpoint = self.config, None if resume is None else resume.checkpoint
        self.start(checkpoint)
        if resume is not None and checkpoint is not None:
            self.load(checkpoint)
            resume.carry_on()
        self.update = Update(config, self.algorithm, self.roles.training, self.state, self.model.half_precision)
        self.check_sampling()
        self.open_log()
        self.recovery.remember(self.state.step, self.model.trained_parameters)

    def start(self, checkpoint: Checkpoint | None = None) -> None:
        """Start the workers, check the model and try the scorers, and load the model, as `checkpoint` needs it."""
        config, cluster, begins = self.config, self.cluster, checkpoint.step if checkpoint else 0
        whole = spared = with_scorers_found(replace(config, model=config.model.carried_on()) if checkpoint else config)
        self.control.stop(begins)
        functions = given(config.reward.scorers) if config.algorithm.differentiates else {}
        if cluster.training < cluster.processes and config.model.offload == "none":
            # those that only train call nothing but the denoiser: what else there is stays in main memory
            spared = replace(whole, model=replace(whole.model, offload="encoders"))
        per_epoch = prompt_schedule(config, self.prompts).steps_per_epoch
        total_updates = config.trainer.steps * config.actor.updates
        logger.info("reward: %s", described(config.reward.scorers))
        name = "/".join(self.run_dir.absolute().parts[-2:])
        self.rewards = RewardManager(config.reward, cluster, name, self.timeline)
        self.workers = cluster.workers(
            "worker",
            HybridWorker,
            cluster.processes,
            lambda rank: (
                spared if rank < cluster.training else whole,
                rank,
                cluster.worker_device(rank),
                cluster.threads,
                total_updates,
                functions,
            ),
            gpus=cluster.gpus,
            threads=cluster.threads,
            together=cluster.ranks,
        )
        self.check_model()
        with waiting("trying the scorers on grey images", self.downloads):
            drawn = self.prompts if config.data.train_on == "drawn" else self.held_out
            try_scorers(self.rewards, config, drawn, self.held_out)
        self.control.stop(begins)
        self.model = model = self.load_model()
        columns = unused_columns([*self.prompts, *self.held_out], config, model.arguments)
        for sentence in [*model.notes, *saving_notes(config), *columns]:
            logger.info("%s", sentence)
        for sentence in model.warnings:
            logger.warning("%s", sentence)
        ranks = f" of {cluster.ranks} ranks" if cluster.ranks > 1 else ""
        what = "LoRA of %s parameters on" if config.model.train == "lora" else "%s trained weights of"
        roles = ""
        if config.cluster.layout == "split":
            training, drawing = config.cluster.roles(cluster.num_workers)
            roles = f" ({drawing} for sampling, {training} for training)"
        logger.info(
            f"%s, {what} %s; %d worker(s)%s on %s%s; %d prompts, %d steps per epoch",
            *(model.pipeline, f"{model.trained_parameters:,}", " and ".join(model.denoisers)),
            *(cluster.num_workers, ranks, cluster.device, roles, len(self.prompts), per_epoch),
        )
        self.state.identity |= {"model.path": model.weights}
        asked = cluster.ranks if config.lockstep else 1
        self.prompts, self.held_out = without_overlong(config, self.workers, asked, self.prompts, self.held_out)

    def check_sampling(self) -> None:
        """Warn of settings that cannot work with the loaded model, in numbers measured on a first micro-batch."""
        config, algorithm = self.config, self.algorithm
        if not algorithm.settings.scores_steps or config.algorithm.cfg == "off":
            return
        samples = plan_samples(config, plan_prompts(config, self.prompts, 1), 1, self.state.policy_version)
        task = Algorithm.plan(algorithm, samples)[0]
        with waiting(f"measuring the numerical noise of the ratio on {len(task.samples)} images"):
            asked = range(self.cluster.ranks if config.lockstep else 1)
            probes = [self.roles.training.submit(rank, HybridWorker.probe, task) for rank in asked]
            probe = probes[0].result()
        logger.info("on policy |log ratio| is at most %.1e (99th percentile)", probe.log_ratio_noise)
        if (clip := config.algorithm.clip_range_at(probe.dimensions)) is not None:
            self.update.clip_range = clip
            logger.info(
                "the ratio is clipped %.3g below and %.3g above 1: algorithm.clip_low and clip_high for latents of %s "
                "dimensions",
                *(*clip, f"{probe.dimensions:,}"),
            )
        for sentence in probe_warnings(probe, nearer_bound(config.algorithm, probe)):
            logger.warning("%s", sentence)

    def draw(self, step: int, watch: Stopwatch) -> Drawn:
        """The images of a step and their scores; with dynamic sampling until enough groups have a signal.

        Before its scores are waited for, the steps ahead of it are drawn that `trainer.staleness` asks for; workers
        that do nothing else begin with them.
        """
        config, drawn = self.config, Drawn()
        self.refresh(watch)
        for attempt in range(config.algorithm.dynamic_sampling + 1):
            ahead = range(step, min(step + config.trainer.staleness, config.trainer.steps) + 1)
            for other in ahead if attempt == 0 else [step]:
                if other not in self.ahead:
                    self.ahead[other] = self.roll_out(self.plan(other, attempt, len(drawn.tasks)))
                if other == step or config.cluster.layout == "hybrid":
                    self.wait_until_drawn(self.ahead[other].rollouts, watch)
            rolled = self.ahead.pop(step)
            images, scores = self.score(rolled, drawn, watch)
            if attempt == 0 and (step == 1 or _due(step, config.validation.every, config.trainer.steps)):
                training_sheet(self.tracker, rolled.tasks[0].samples, images.result().pixels, scores)
            if attempt:
                drawn.scored.further_prompts += len({s.prompt.id for task in rolled.tasks for s in task.samples})
            if len(drawn.scored.groups_with_signal()) >= config.rollout.prompts_per_step:
                break
        self.drawn_ends = end_drawing(config, self.roles.drawing, step)
        return drawn

    def plan(self, step: int, attempt: int = 0, begun: int = 0) -> list[RolloutTask]:
        """The micro-batches of a step, after `begun` ones; each of those on their way has another id."""
        staleness = self.config.trainer.staleness
        prompts = plan_prompts(self.config, self.prompts, step, attempt)
        samples = plan_samples(self.config, prompts, step, self.state.policy_version)
        tasks = self.algorithm.plan(samples, first_id=begun + step % (staleness + 1) * APART)
        if self.regularising and attempt == 0:
            given = plan_samples(self.config, plan_images(self.config, self.regularising, step), step, 0)
            tasks += Algorithm.plan(self.algorithm, given, first_id=tasks[-1].id + 1)
        # drawn with the weights there were when the one before it was due, also if that was before the run was resumed
        lag = max(0, self.state.step - max(0, step - 1 - staleness))
        return [replace(task, lag=lag) for task in tasks] if lag else tasks

    def abandon(self) -> None:
        """Give up what is drawn and scored."""
        self.ahead.clear()
        self.drawn_ends.clear()
        self.rewards.give_up()

    def start_ray_anew(self, error: Exception) -> None:
        super().start_ray_anew(error)
        self.rewards.start_all()

    @property
    def on_their_way(self) -> list[Rollouts]:
        """The images that are drawn ahead of the step that is trained."""
        return [rolled.rollouts for _, rolled in sorted(self.ahead.items())]

    def refresh(self, watch: Stopwatch) -> None:
        """Let workers that only draw do so with the weights of the last finished step, after what they have begun."""
        if self.config.cluster.layout == "split":
            for rollouts in self.on_their_way:
                self.wait_until_drawn(rollouts, watch)
            self.send_weights()

    def wait_until_drawn(self, rollouts: Rollouts, watch: Stopwatch) -> None:
        """Wait for the images of a step, which are scored meanwhile."""
        what = "drawing" if self.config.data.train_on == "drawn" else "reading"
        with watch("rollout"), waiting(f"{what} {rollouts.total} images", self.progress_of(rollouts), self.patience):
            rollouts.wait_until_drawn()

    def roll_out(self, tasks: Sequence[RolloutTask]) -> Rolled:
        """Begin to draw `tasks`."""
        return roll_out(self.config, self.rewards, self.roles.drawing, self.roles.training, tasks)

    def score(self, rolled: Rolled, drawn: Drawn, watch: Stopwatch) -> tuple[Pending[Images], Scores]:
        """Wait for the scores of what was drawn, and add it to `drawn`; returns what came of the first micro-batch."""
        rollouts = rolled.rollouts
        said = f"scoring {rollouts.total} images"
        with watch("reward_wait"), waiting(said, self.progress_of(rollouts), self.patience):
            found = rollouts.finish(self.on_their_way)
        found = [scores_of(task.samples, scores) for task, scores in zip(rolled.tasks, found, strict=True)]
        for task, scores in zip(rolled.tasks, found, strict=True):
            if not self.regularising or task.samples[0].given is None:
                drawn.scored.add(task.samples, scores)
        rolled.end(drawn, self.config)
        return rollouts.images[0], found[0]

    def progress_of(self, rollouts: Rollouts) -> Callable[[], str]:
        """Words for how much is drawn and downloaded so far."""
        return lambda: ", ".join(filter(None, (rollouts.progress(), self.downloads())))

    def credit(self, drawn: Drawn, watch: Stopwatch) -> tuple[Metrics, torch.Tensor]:
        """The metrics of the rewards, and the credit `[B, T]` that they give the samples."""
        kl = None
        if self.config.algorithm.subtracts_kl and self.algorithm.kl_coef > 0:
            with watch("update"):
                kl = self.kl_to_base(drawn)
        metrics, credit, drawn.gate = credit_step(self.config, self.algorithm, drawn.scored, kl)
        return metrics | self.rewards.metrics(), credit

    def kl_to_base(self, drawn: Drawn) -> list[float]:
        """Distances `[B]` of the samples to the base model, computed by all workers at once."""
        owned = [(task.id, owner) for task, owner in zip(drawn.tasks, drawn.owners, strict=True)]
        pending = [self.roles.training.submit(owner, HybridWorker.kl_to_base, task_id) for task_id, owner in owned]
        also = [(task_id, follower) for task_id, owner in owned for follower in followers(owner, self.config)]
        for task_id, process in also + [(repeated(task_id), process) for task_id, process in drawn.repeats]:
            self.roles.training.submit(process, HybridWorker.kl_to_base, task_id)
        return [value for found in pending for value in found.result()]

    def train(self, drawn: Drawn, credit: torch.Tensor, watch: Stopwatch) -> Metrics:
        """Take the step's optimizer steps; returns their metrics."""
        lora, self.update.state = self.config.model.train == "lora", self.state
        with watch("update"), waiting(f"updating the {'LoRA' if lora else 'weights'}", after=self.patience):
            lag = min(self.config.trainer.staleness, self.state.step)
            trained = self.timeline.span("update", *(f"worker {i}" for i in self.roles.training.numbers))
            with meanwhile(self.rewards, self.on_their_way), trained:
                metrics = self.update.run(drawn.tasks, credit, drawn.sets, lag, self.drawn_ends, drawn.gate)
        signal = bool((credit.nan_to_num().abs() > NO_CREDIT).any())
        groups = [] if drawn.scored.given else list(drawn.scored.by_group().values())
        return metrics | self.health.measure(drawn.scored.by_scorer, signal, groups)

    def validate(self, step: int, watch: Stopwatch | None = None) -> Metrics:
        """Mean rewards on the held-out prompts: fixed noise, ODE sampling, averaged LoRA."""
        if not self.held_out:
            return {}
        watch = watch or Stopwatch(self.timeline)
        self.refresh(watch)
        scored = Scored()
        with watch("validation"):
            batches, workers = plan_validation(self.config, self.held_out, step), self.roles.drawing
            owners = share([len(batch) for batch in batches], self.config, len(workers))

            def submit(i: int) -> Pending[Images]:
                image = workers.submit(owners.processes[i], HybridWorker.validate, i, batches[i])
                also = [(i, follower) for follower in followers(owners.processes[i], self.config)]
                for k, process in also + owners.repeated_after(i):
                    workers.submit(process, HybridWorker.validate, k, batches[k])
                return image

            what, count = f"validating {len(self.held_out)} prompts", sum(map(len, batches))
            bar = Progress(count, disable=not self.config.logger.progress, unit="image", what=what)
            given = self.rewards, batches, submit, owners.processes, workers.hang_after
            rollouts = Rollouts(*given, done=lambda i: bar.update(len(batches[i])), held_out=True)
            with waiting(what, self.progress_of(rollouts)), bar:
                found = rollouts.finish()
            for batch, scores in zip(batches, found, strict=True):
                scored.add(batch, scores)
            metrics = self.validations.conclude(step, scored, rollouts.images, batches, self.model, self.cluster.device)
        self.val_reward, self.validated_step = self.validations.reward, step
        return metrics


def _due(step: int, every: int, total: int) -> bool:
    return step == total or (every > 0 and step % every == 0)
