"""The training loop: roll out, score, advantages, update, log, validate, save."""

import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gerl.algorithms import Algorithm, build_algorithm, count_pairs
from gerl.algorithms.planning import plan_prompts, plan_samples, plan_validation, prompt_schedule, update_parts
from gerl.algorithms.signal_checks import probe_warnings, ratio_limit, ratio_problem
from gerl.cluster import Cluster, WorkerGroup
from gerl.config import Config
from gerl.errors import CheckpointError, GerlError, Interrupted, TrainingError
from gerl.pages.images import grid, still
from gerl.protocol import Prompt, RolloutTask, StepResult, UpdateStats
from gerl.rewards.manager import RewardManager
from gerl.run.checkpoint import Checkpoint, prune, save_checkpoint
from gerl.run.report import save_validation
from gerl.run.signals import Signals
from gerl.run.timing import Stopwatch
from gerl.run.tracking import Progress, Tracker
from gerl.trainer.credit import Metrics, Scored, credit_step
from gerl.utils.seeding import seed_everything
from gerl.workers.hybrid import HybridWorker

logger = logging.getLogger(__name__)
GRID = 32  # images in a sample grid
MAX_NONFINITE = 3  # updates without a finite gradient that are skipped before the run stops


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
        self.identity = identity  # what a resumed run must have in common with this one
        self.signals = signals or Signals()
        self.algorithm: Algorithm = build_algorithm(config)
        self.step = 0  # finished trainer steps
        self.policy_version = 0
        self.nonfinite = 0
        self.val_reward: float | None = None  # of the last validation, after step `validated_step`
        self.validated_step: int | None = None
        self.saved_step: int | None = None
        self.unlogged: Metrics = {}  # of a step whose update is done, but not yet its validation and its line
        self.mid_update = False  # some, but not all, optimizer steps of a trainer step are taken
        self.half_precision = False  # of the base weights
        self.workers: WorkerGroup
        self.rewards: RewardManager
        self.tracker: Tracker

    def fit(self, resume: Checkpoint | None = None) -> None:
        """Train to `trainer.steps`, from `resume` if given; a run that is stopped early leaves a checkpoint."""
        self.setup(resume)
        config, total = self.config, self.config.trainer.steps
        try:
            if self.step == 0 and self.held_out:
                self.tracker.log(0, self.validate(0))
            with Progress(total, self.step, disable=not config.logger.progress) as progress:
                if self.unlogged:  # the resumed run was stopped before the end of its last step
                    self.conclude(Stopwatch())
                for step in range(self.step + 1, total + 1):
                    watch = Stopwatch()
                    with watch("step"):
                        tasks, scored = self.draw(step, watch)
                        metrics, credit = credit_step(config, self.algorithm, scored, self.kl_to_base(tasks, watch))
                        metrics |= self.rewards.metrics()
                        with self.signals.deferred():
                            self.unlogged = metrics | self.update(tasks, credit, watch) | watch.metrics()
                            self.step = step
                    self.conclude(watch)
                    progress.update(metrics["reward/mean"], **self.postfix())
        except GerlError:
            self.rescue()
            raise
        finally:
            self.tracker.close()

    def conclude(self, watch: Stopwatch) -> None:
        """End a step: validate, log its line, save."""
        step, total = self.step, self.config.trainer.steps
        if _due(step, self.config.validation.every, total):
            with watch("step"):
                self.unlogged |= self.validate(step, watch)
        with self.signals.deferred():
            self.tracker.log(step, {**self.unlogged, **watch.metrics()})
            self.unlogged = {}
        if _due(step, self.config.checkpoint.every, total):
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
        model = self.workers.run("setup")[0]
        for sentence in model["said"]:
            logger.info("%s", sentence)
        if cluster.remote and len(self.workers) > 1:
            self.workers.run("join", self.workers.submit(0, "address").result(), len(self.workers))
        logger.info(
            "%s, LoRA of %s parameters on %s; %d worker(s) on %s; %d prompts, %d steps an epoch",
            *(model["pipeline"], f"{model['lora_parameters']:,}", " and ".join(model["denoisers"])),
            *(len(self.workers), cluster.device, len(self.prompts), per_epoch),
        )
        self.half_precision = bool(model["half_precision"])
        self.identity |= {"model.path": model["weights"]}
        if resume is not None:
            self.load(resume)
        self.check_sampling()
        # a run that was stopped at step 0 validates again: -1 cuts what it had logged
        self.tracker = Tracker(self.run_dir, config.logger, start_step=self.step or -1)

    def check_sampling(self) -> None:
        """Warn of settings that cannot work with the loaded model, in numbers measured on a first micro-batch."""
        config, algorithm = self.config, self.algorithm
        if not algorithm.settings.scores_steps or config.algorithm.cfg == "off":
            return
        samples = plan_samples(config, plan_prompts(config, self.prompts, 1), 1, self.policy_version)
        task = Algorithm.plan(algorithm, samples)[0]
        probe = self.workers.submit(0, "probe", task).result()
        logger.info("on policy |log ratio| is at most %.1e (99th percentile)", probe.log_ratio_noise)
        clip = min(bounds) if (bounds := config.algorithm.clip_range) else None
        for sentence in probe_warnings(probe, clip):
            logger.warning("%s", sentence)

    def draw(self, step: int, watch: Stopwatch) -> tuple[list[RolloutTask], Scored]:
        """The images of a step and their scores; with dynamic sampling until enough groups have a signal."""
        tasks: list[RolloutTask] = []
        scored = Scored()
        for attempt in range(self.config.algorithm.dynamic_sampling + 1):
            prompts = plan_prompts(self.config, self.prompts, step, attempt)
            samples = plan_samples(self.config, prompts, step, self.policy_version)
            new = self.algorithm.plan(samples, first_id=len(tasks))
            self.roll_out(new, scored, watch)
            tasks += new
            scored.further_prompts += len(prompts) if attempt else 0
            if len(scored.groups_with_signal()) >= self.config.rollout.prompts_per_step:
                break
        return tasks, scored

    def roll_out(self, tasks: Sequence[RolloutTask], scored: Scored, watch: Stopwatch) -> None:
        """Add images and scores of `tasks` to `scored`; each micro-batch is scored while the next one is denoised."""
        workers = self.workers
        scoring = self.rewards.open(
            [task.samples for task in tasks],
            lambda i: workers.submit(i % len(workers), "generate", tasks[i]),
            lanes=len(workers),
        )
        with watch("rollout"):
            scoring.until_drawn()
        with watch("reward_wait"):
            for task, scores in zip(tasks, scoring.finish(), strict=True):
                scored.add(task.samples, scores)

    def kl_to_base(self, tasks: Sequence[RolloutTask], watch: Stopwatch) -> list[float] | None:
        """Distances `[B]` of the samples to the base model, if the rewards are to pay for them."""
        if not (self.config.algorithm.subtracts_kl and self.config.algorithm.kl_coef > 0):
            return None
        with watch("update"):
            answers = [self.workers.run("kl_to_base", task.id) for task in tasks]
        return [value for found in answers for values in found if values is not None for value in values]

    def update(self, tasks: Sequence[RolloutTask], credit: torch.Tensor, watch: Stopwatch) -> Metrics:
        """Take the step's optimizer steps; the first is on policy, where the ratio must be 1."""
        seed_everything("update", self.config.trainer.seed, self.step)
        by_task = dict(zip((t.id for t in tasks), credit.split([len(t.samples) for t in tasks]), strict=True))
        stats, result, deviation = UpdateStats(), StepResult(0.0, 0.0, False), 0.0
        with watch("update"):
            for number, part in enumerate(update_parts(tasks, self.config.actor.updates_per_step)):
                given = {task.id: by_task[task.id] for task in part}
                if not self._has_signal(torch.cat(list(given.values()))):
                    continue  # decided here for all workers, which must take the same steps
                pairs = count_pairs((task, given[task.id]) for task in part)
                new = sum(self.workers.run("accumulate", given, pairs), UpdateStats())
                if number == 0 and self.config.algorithm.scores_steps:
                    deviation = new.ratio_deviation
                    self._check_ratio(deviation)
                self._reduce_gradients()
                result = self.workers.run("step")[0]
                self.mid_update |= result.applied
                self._count(result)
                stats += new
            self.workers.run("finish_step", self.step + 1)
        self.mid_update = False
        return _actor_metrics(stats, result, deviation) | {
            "actor/nonfinite_updates": float(self.nonfinite),
            "actor/policy_version": float(self.policy_version),
        }

    def _has_signal(self, credit: torch.Tensor) -> bool:
        known = credit[~credit.isnan()]
        return bool(len(known) if self.algorithm.needs_all_samples else known.any())

    def _check_ratio(self, deviation: float) -> None:
        limit = ratio_limit(self.config.actor, self.half_precision)
        if deviation > limit:  # a NaN comes with a non-finite gradient, which is skipped and counted
            raise TrainingError(ratio_problem(deviation, limit))

    def _reduce_gradients(self) -> None:
        """Sum the workers' gradients, so that all take the same step."""
        if len(self.workers) == 1:
            return
        if self.cluster.remote:
            self.workers.run("reduce_gradient")
        else:
            self.workers.run("set_flat_gradient", torch.stack(self.workers.run("flat_gradient")).sum(0))

    def _count(self, result: StepResult) -> None:
        self.policy_version += result.applied
        if not result.applied:
            self.nonfinite += 1
            logger.warning("update skipped: its gradient is not finite (%d so far)", self.nonfinite)
            if self.nonfinite > MAX_NONFINITE:
                raise TrainingError(
                    f"{self.nonfinite} updates had no finite gradient: lower actor.lr, or use model.dtype=float32"
                )

    def validate(self, step: int, watch: Stopwatch | None = None) -> Metrics:
        """Mean rewards on the held-out prompts: fixed noise, ODE sampling, averaged LoRA."""
        if not self.held_out:
            return {}
        scored, limit = Scored(), GRID
        with (watch or Stopwatch())("validation"):
            batches, workers = plan_validation(self.config, self.held_out, step), self.workers
            scoring = self.rewards.open(
                batches, lambda i: workers.submit(i % len(workers), "validate", i, batches[i]), lanes=len(workers)
            )
            for batch, scores in zip(batches, scoring.finish(), strict=True):
                scored.add(batch, scores)
            pixels: list[Any] = []
            for image in scoring.images[: -(-limit // len(batches[0]))]:
                pixels += [still(drawn) for drawn in image.result().pixels]
            metrics = scored.metrics(self.config.reward, validation=True)
        texts = [s.prompt.text for s in scored.samples]
        save_validation(self.run_dir, step, texts, np.stack(pixels[:limit]), scored.totals, scored.by_scorer)
        captions = [_caption(text, total) for text, total in zip(texts, scored.totals, strict=True)]
        self.tracker.images(step, "validation", grid(pixels[:limit], captions[:limit], columns=4))
        self.val_reward, self.validated_step = metrics["val/reward/mean"], step
        logger.info("step %d: reward on %d held-out prompts %.3f", step, len(texts), self.val_reward)
        return metrics

    def postfix(self) -> dict[str, str]:
        """What the progress bar shows besides the reward of the step."""
        return {} if self.val_reward is None else {"held-out": f"{self.val_reward:.3f}"}

    def save(self) -> None:
        """Write a checkpoint of the last finished step and remove those no longer wanted."""
        with self.signals.deferred():
            files, worker_state = self.workers.submit(0, "checkpoint").result()
            state = {
                "step": self.step,
                "finished": self.step == self.config.trainer.steps and not self.unlogged,
                "unlogged": self.unlogged,
                "val_reward": self.val_reward if self.validated_step == self.step else None,
                "nonfinite": self.nonfinite,
                "worker": worker_state,
                "algorithm": self.algorithm.state(),
                "identity": self.identity,
            }
            root = self.run_dir / "checkpoints"
            save_checkpoint(root, self.step, files, state)
            prune(root, self.config.checkpoint.keep)
            self.saved_step = self.step

    def load(self, checkpoint: Checkpoint) -> None:
        """Continue from `checkpoint`; raises `CheckpointError` if it belongs to another model, data or LoRA."""
        state = checkpoint.state
        check_identity(checkpoint, self.identity)
        self.workers.run("load_checkpoint", checkpoint.read("state.safetensors"), state["worker"])
        self.algorithm.load_state(state["algorithm"])
        self.step, self.nonfinite = state["step"], state["nonfinite"]
        self.val_reward, self.validated_step = state["val_reward"], self.step
        self.policy_version = state["worker"]["policy_version"]
        self.unlogged, self.saved_step = state["unlogged"], self.step
        logger.info("resumed from %s", checkpoint.path)

    def rescue(self) -> None:
        """A run that stops keeps its last finished step, if the workers still hold it."""
        if self.saved_step == self.step or self.mid_update:
            return
        try:
            self.workers.run("forget")
            with contextlib.suppress(Interrupted):  # the signal that ended the run speaks up again after the save
                self.save()
            logger.info("stopped after step %d: checkpoint in %s", self.step, self.run_dir / "checkpoints")
        except GerlError as second:
            logger.warning("no checkpoint of step %d could be written: %s", self.step, second)


def check_identity(checkpoint: Checkpoint, identity: dict[str, str]) -> None:
    """Raise `CheckpointError` if something has changed that a resumed run must share with the one before."""
    changed = [key for key, value in identity.items() if checkpoint.state["identity"].get(key) != value]
    if changed:
        raise CheckpointError(
            f"{checkpoint.path} cannot be resumed: {' and '.join(changed)} changed since it was written; restore it, "
            "or start anew with checkpoint.resume=never"
        )


def _actor_metrics(stats: UpdateStats, result: StepResult, deviation: float) -> Metrics:
    pairs = max(stats.pairs, 1)
    return {
        "actor/ratio_deviation": deviation,
        "actor/clip_fraction": (stats.clip_low + stats.clip_high) / pairs,
        "actor/clip_fraction_low": stats.clip_low / pairs,
        "actor/clip_fraction_high": stats.clip_high / pairs,
        "actor/log_ratio_mean": stats.log_ratio / pairs,
        "actor/loss": stats.loss / pairs,
        "actor/kl": stats.kl / pairs,
        "actor/grad_norm": result.grad_norm,
        "actor/lr": result.lr,
        **{f"actor/{name}": value / pairs for name, value in stats.extra.items()},
    }


def _due(step: int, every: int, total: int) -> bool:
    return step == total or (every > 0 and step % every == 0)


def _caption(text: str, total: float | None) -> str:
    quoted = text.split('"')  # the text to be drawn says more than the beginning of the prompt
    return f"{'failed' if total is None else f'{total:.2f}'} {quoted[1] if len(quoted) > 2 else text}"
