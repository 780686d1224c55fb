"""The training loop: draw and score, credit, train, log, validate, save."""

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from gerl.algorithms import Algorithm, build_algorithm
from gerl.algorithms.planning import plan_prompts, plan_samples, plan_validation, prompt_schedule
from gerl.algorithms.signal_checks import probe_warnings
from gerl.cluster import Cluster, WorkerGroup
from gerl.config import Config
from gerl.errors import CheckpointError, GerlError, Interrupted
from gerl.pages.images import grid, still
from gerl.protocol import Prompt, RolloutTask
from gerl.rewards.manager import RewardManager
from gerl.run.checkpoint import Checkpoint, prune, save_checkpoint
from gerl.run.report import save_validation
from gerl.run.signals import Signals
from gerl.run.state import RunState
from gerl.run.timing import Stopwatch
from gerl.run.tracking import Progress, Tracker
from gerl.trainer.credit import Metrics, Scored, credit_step
from gerl.trainer.rollouts import Rollouts
from gerl.trainer.update import Update
from gerl.workers.hybrid import HybridWorker

logger = logging.getLogger(__name__)
GRID = 32  # images in a sample grid


@dataclass
class Drawn:
    """The micro-batches of a step, the worker that holds the trajectories of each, and what the scorers said."""

    tasks: list[RolloutTask] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)
    scored: Scored = field(default_factory=Scored)


class RayDiffusionTrainer:
    """An algorithm over a cluster's workers; `fit` is the run. The driver holds no model and moves only images."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        cluster: Cluster,
        prompts: Sequence[Prompt],
        held_out: Sequence[Prompt],
        identity: dict[str, str],
        signals: Signals | None = None,
    ) -> None:
        self.config, self.run_dir, self.cluster = config, run_dir, cluster
        self.prompts, self.held_out = prompts, held_out[: config.validation.max_prompts]
        self.signals = signals or Signals()
        self.algorithm: Algorithm = build_algorithm(config)
        self.state = RunState(identity=identity)
        self.val_reward: float | None = None  # of the last validation, after step `validated_step`
        self.validated_step: int | None = None
        self.saved_step: int | None = None
        self.workers: WorkerGroup[HybridWorker]
        self.rewards: RewardManager
        self.update: Update
        self.tracker: Tracker

    def fit(self, resume: Checkpoint | None = None) -> None:
        """Train to `trainer.steps`, from `resume` if given; a run that is stopped early leaves a checkpoint."""
        self.setup(resume)
        config, state, total = self.config, self.state, self.config.trainer.steps
        try:
            if state.step == 0 and self.held_out:
                self.tracker.log(0, self.validate(0))
            with Progress(total, state.step, disable=not config.logger.progress) as progress:
                if state.unlogged:  # the resumed run was stopped before the end of its last step
                    self.conclude(Stopwatch())
                for step in range(state.step + 1, total + 1):
                    watch = Stopwatch()
                    with watch("step"):
                        drawn = self.draw(step, watch)
                        metrics, credit = self.credit(drawn, watch)
                        with self.signals.deferred():
                            state.unlogged = metrics | self.train(drawn, credit, watch) | watch.metrics()
                            state.step = step
                    self.conclude(watch)
                    progress.update(metrics["reward/mean"], **self.postfix())
        except GerlError:
            self.rescue()
            raise
        finally:
            self.tracker.close()

    def conclude(self, watch: Stopwatch) -> None:
        """End a step: validate, log its line, save."""
        state, total = self.state, self.config.trainer.steps
        if _due(state.step, self.config.validation.every, total):
            with watch("step"):
                state.unlogged |= self.validate(state.step, watch)
        with self.signals.deferred():
            self.tracker.log(state.step, {**state.unlogged, **watch.metrics()})
            state.unlogged = {}
        if _due(state.step, self.config.checkpoint.every, total):
            self.save()

    def setup(self, resume: Checkpoint | None) -> None:
        """Start the workers and load the model and, where given, the checkpoint."""
        config, cluster = self.config, self.cluster
        per_epoch = prompt_schedule(config, len(self.prompts)).steps_per_epoch
        total_updates = config.trainer.steps * config.actor.updates_per_step
        self.rewards = RewardManager(config.reward, cluster)
        self.workers = cluster.workers(
            "worker",
            HybridWorker,
            cluster.num_workers,
            lambda rank: (config, rank, cluster.worker_device(rank), cluster.threads, total_updates),
            gpus=cluster.gpus,
            threads=cluster.threads,
        )
        model = self.workers.run(HybridWorker.setup)[0]
        for sentence in model.notes:
            logger.info("%s", sentence)
        if cluster.remote and len(self.workers) > 1:
            address = self.workers.submit(0, HybridWorker.address).result()
            self.workers.run(HybridWorker.join, address, len(self.workers))
        logger.info(
            "%s, LoRA of %s parameters on %s; %d worker(s) on %s; %d prompts, %d steps an epoch",
            *(model.pipeline, f"{model.lora_parameters:,}", " and ".join(model.denoisers)),
            *(len(self.workers), cluster.device, len(self.prompts), per_epoch),
        )
        self.state.identity |= {"model.path": model.weights}
        if resume is not None:
            self.load(resume)
        self.update = Update(config, self.algorithm, self.workers, self.state, model.half_precision)
        self.check_sampling()
        # a run that was stopped at step 0 validates again: -1 cuts what it had logged
        self.tracker = Tracker(self.run_dir, config.logger, start_step=self.state.step or -1)

    def check_sampling(self) -> None:
        """Warn of settings that cannot work with the loaded model, in numbers measured on a first micro-batch."""
        config, algorithm = self.config, self.algorithm
        if not algorithm.settings.scores_steps or config.algorithm.cfg == "off":
            return
        samples = plan_samples(config, plan_prompts(config, self.prompts, 1), 1, self.state.policy_version)
        task = Algorithm.plan(algorithm, samples)[0]
        probe = self.workers.submit(0, HybridWorker.probe, task).result()
        logger.info("on policy |log ratio| is at most %.1e (99th percentile)", probe.log_ratio_noise)
        clip = min(bounds) if (bounds := config.algorithm.clip_range) else None
        for sentence in probe_warnings(probe, clip):
            logger.warning("%s", sentence)

    def draw(self, step: int, watch: Stopwatch) -> Drawn:
        """The images of a step and their scores; with dynamic sampling until enough groups have a signal."""
        drawn = Drawn()
        for attempt in range(self.config.algorithm.dynamic_sampling + 1):
            prompts = plan_prompts(self.config, self.prompts, step, attempt)
            samples = plan_samples(self.config, prompts, step, self.state.policy_version)
            self.roll_out(self.algorithm.plan(samples, first_id=len(drawn.tasks)), drawn, watch)
            drawn.scored.further_prompts += len(prompts) if attempt else 0
            if len(drawn.scored.groups_with_signal()) >= self.config.rollout.prompts_per_step:
                break
        return drawn

    def roll_out(self, tasks: Sequence[RolloutTask], drawn: Drawn, watch: Stopwatch) -> None:
        """Draw and score `tasks`, and add them to `drawn`."""
        workers, owners = self.workers, [i % len(self.workers) for i in range(len(tasks))]
        rollouts = Rollouts(
            self.rewards,
            [task.samples for task in tasks],
            lambda i: workers.submit(owners[i], HybridWorker.generate, tasks[i]),
            len(workers),
        )
        with watch("rollout"):
            rollouts.wait_until_drawn()
        with watch("reward_wait"):
            for task, scores in zip(tasks, rollouts.finish(), strict=True):
                drawn.scored.add(task.samples, scores)
        drawn.tasks += tasks
        drawn.owners += owners

    def credit(self, drawn: Drawn, watch: Stopwatch) -> tuple[Metrics, torch.Tensor]:
        """The metrics of the rewards, and the credit `[B, T]` that they give the samples."""
        kl = None
        if self.config.algorithm.subtracts_kl and self.config.algorithm.kl_coef > 0:
            with watch("update"):
                kl = self.kl_to_base(drawn)
        metrics, credit = credit_step(self.config, self.algorithm, drawn.scored, kl)
        return metrics | self.rewards.metrics(), credit

    def kl_to_base(self, drawn: Drawn) -> list[float]:
        """Distances `[B]` of the samples to the base model, computed by all workers at once."""
        owned = zip(drawn.tasks, drawn.owners, strict=True)
        pending = [self.workers.submit(owner, HybridWorker.kl_to_base, task.id) for task, owner in owned]
        return [value for found in pending for value in found.result()]

    def train(self, drawn: Drawn, credit: torch.Tensor, watch: Stopwatch) -> Metrics:
        """Take the step's optimizer steps; returns their metrics."""
        with watch("update"):
            return self.update.run(drawn.tasks, credit)

    def validate(self, step: int, watch: Stopwatch | None = None) -> Metrics:
        """Mean rewards on the held-out prompts: fixed noise, ODE sampling, averaged LoRA."""
        if not self.held_out:
            return {}
        scored, pixels = Scored(), list[np.ndarray]()
        with (watch or Stopwatch())("validation"):
            batches, workers = plan_validation(self.config, self.held_out, step), self.workers
            rollouts = Rollouts(
                self.rewards,
                batches,
                lambda i: workers.submit(i % len(workers), HybridWorker.validate, i, batches[i]),
                len(workers),
            )
            for batch, scores in zip(batches, rollouts.finish(), strict=True):
                scored.add(batch, scores)
            for image in rollouts.images[: -(-GRID // len(batches[0]))]:
                pixels += [still(drawn) for drawn in image.result().pixels]
            metrics = scored.metrics(self.config.reward, validation=True)
        texts = [s.prompt.text for s in scored.samples]
        save_validation(self.run_dir, step, texts, np.stack(pixels[:GRID]), scored.totals, scored.by_scorer)
        captions = [_caption(text, total) for text, total in zip(texts, scored.totals, strict=True)]
        self.tracker.images(step, "validation", grid(pixels[:GRID], captions[:GRID], columns=4))
        self.val_reward, self.validated_step = metrics["val/reward/mean"], step
        logger.info("step %d: reward on %d held-out prompts %.3f", step, len(texts), self.val_reward)
        return metrics

    def postfix(self) -> dict[str, str]:
        """The entries of the progress bar besides the reward of the step."""
        return {} if self.val_reward is None else {"held-out": f"{self.val_reward:.3f}"}

    def save(self) -> None:
        """Write a checkpoint of the last finished step and remove those no longer wanted."""
        with self.signals.deferred():
            files, worker = self.workers.submit(0, HybridWorker.checkpoint).result()
            state = replace(
                self.state,
                finished=self.state.step == self.config.trainer.steps and not self.state.unlogged,
                val_reward=self.val_reward if self.validated_step == self.state.step else None,
                worker=worker,
                algorithm=self.algorithm.state(),
            )
            root = self.run_dir / "checkpoints"
            save_checkpoint(root, state.step, files, state.to_json())
            prune(root, self.config.checkpoint.keep)
            self.saved_step = state.step

    def load(self, checkpoint: Checkpoint) -> None:
        """Continue from `checkpoint`; raises `CheckpointError` if it belongs to another model, data or LoRA."""
        check_identity(checkpoint, self.state.identity)
        self.state = replace(RunState.of(checkpoint), identity=self.state.identity)
        self.workers.run(HybridWorker.load_checkpoint, checkpoint.read("state.safetensors"), self.state.worker)
        self.algorithm.load_state(self.state.algorithm)
        self.val_reward, self.validated_step = self.state.val_reward, self.state.step
        self.saved_step = self.state.step
        logger.info("resumed from %s", checkpoint.path)

    def rescue(self) -> None:
        """A run that stops keeps its last finished step, if the workers still hold it."""
        step = self.state.step
        if self.saved_step == step or self.update.unfinished:
            return
        try:
            self.workers.run(HybridWorker.forget)
            with contextlib.suppress(Interrupted):  # the signal that ended the run is raised again when the save ends
                self.save()
            logger.info("stopped after step %d: checkpoint in %s", step, self.run_dir / "checkpoints")
        except GerlError as second:
            logger.warning("no checkpoint of step %d could be written: %s", step, second)


def check_identity(checkpoint: Checkpoint, identity: dict[str, str]) -> None:
    """Raise `CheckpointError` if something has changed that a resumed run must share with the one before."""
    changed = [key for key, value in identity.items() if checkpoint.state["identity"].get(key) != value]
    if changed:
        raise CheckpointError(
            f"{checkpoint.path} cannot be resumed: {' and '.join(changed)} changed since it was written; restore it, "
            "or start anew with checkpoint.resume=never"
        )


def _due(step: int, every: int, total: int) -> bool:
    return step == total or (every > 0 and step % every == 0)


def _caption(text: str, total: float | None) -> str:
    quoted = text.split('"')  # the text to be drawn says more than the beginning of the prompt
    return f"{'failed' if total is None else f'{total:.2f}'} {quoted[1] if len(quoted) > 2 else text}"
