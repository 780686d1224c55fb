"""Sample with the base model and with LoRAs, on the workers of a cluster."""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from gerl.algorithms.planning import plan_validation
from gerl.cluster import Cluster, Pending
from gerl.config import Config
from gerl.evaluate.comparison import ScoredRow, Task, plan, scored_rows
from gerl.evaluate.loras import BASE
from gerl.model.denoisers import find_denoisers, quiet_libraries
from gerl.model.errors import check_backend, model_errors
from gerl.model.hub import Downloads
from gerl.model.loading import load_pipeline
from gerl.model.placement import compile_blocks
from gerl.model.policy import EMA, Policy, WeightVariants, attach, switch
from gerl.model.prompts import unguided
from gerl.progress import waiting
from gerl.protocol import CutPrompts, Images, Prompt, Sample
from gerl.rewards.manager import RewardManager
from gerl.rewards.rollouts import PendingRollout, RoundRobin
from gerl.run.checkpoint import models_in
from gerl.trainer.overlong import sentences
from gerl.utils.files import capture_logs, pass_on_logs
from gerl.workers.base_judge import BaseJudge
from gerl.workers.rollout import Rollout

logger = logging.getLogger("gerl")


class EvaluationWorker:
    """Worker that samples with the base model or a LoRA, like the trainer's validation."""

    def __init__(self, config: Config, loras: Mapping[str, Path], device: str, threads: int) -> None:
        self.config, self.loras, self.device, self.threads = config, dict(loras), device, threads
        self.rollout: Rollout
        self.weights: WeightVariants
        self.notes: list[str] = []  # for the command's log

    def setup(self, remote: bool = False) -> list[str]:
        """Load the pipeline and the LoRAs. Returns the messages logged meanwhile.

        `remote`: whether later messages are collected for `take_notes`, since nobody reads this process's log.
        """
        torch.set_num_threads(self.threads)
        quiet_libraries()
        config, model = self.config, self.config.model
        with capture_logs("gerl.model", logging.INFO) as notes:
            check_backend(model.compile)
            with model_errors("loading"):
                pipe = load_pipeline(model, self.device)
        denoisers = find_denoisers(pipe)
        self.weights = WeightVariants(pipe, {n: models_in(path) for n, path in self.loras.items() if path.is_dir()})
        attach(pipe, {name: path for name, path in self.loras.items() if not path.is_dir()})
        if model.compile is not None:
            for denoiser in denoisers.values():
                compile_blocks(denoiser, model.compile)
        # there is no training rollout, so the configured kernel and sigmas need not fit the model
        sampling = replace(config.sampling, kernel="ode", solver="euler", sigmas="scheduler", compression=1.0)
        # a run's file already has the averaged weights, so there is nothing to swap
        self.rollout = Rollout(Policy(pipe, denoisers, {}, EMA({}, 0.0)), sampling, config.validation)
        if remote:
            pass_on_logs("gerl", logging.INFO, self.notes.append)
        ignored = unguided(type(pipe), sampling)
        return notes + ([] if ignored is None else [ignored])

    def take_notes(self) -> list[str]:
        """Return and clear the messages logged since the last call."""
        notes, self.notes[:] = self.notes.copy(), []
        return notes

    def cut_prompts(self, prompts: Sequence[str], like: Prompt) -> CutPrompts:
        """Return which of `prompts` the pipeline's tokenizers truncate; `like` is one of them."""
        with model_errors("validation"):
            return self.rollout.cut_prompts(prompts, like, None)

    def sample(self, task_id: int, variant: str, samples: Sequence[Sample]) -> Images:
        """Sample a micro-batch with `variant`."""
        start = time.perf_counter()
        switch(self.rollout.policy.pipe, None if variant == BASE or self.loras[variant].is_dir() else variant)
        self.weights.switch(variant)
        pixels, calls = self.rollout.validate(samples)
        scores: dict[str, np.ndarray] = {}
        if self.config.reward.by_latents("validation") is not None:
            self.weights.switch(BASE)
            judge = BaseJudge.of(self.rollout, self.config)
            scores = judge.scores(judge(calls))
        return Images(task_id, pixels, time.perf_counter() - start, scores=scores)


def sample(
    config: Config, loras: Mapping[str, Path], images: int, prompts: Sequence[Prompt], cluster: Cluster
) -> Iterator[list[ScoredRow]]:
    """Sample `images` per prompt with the base model and `loras`; yield the scored rows of a few prompts at a time."""
    variants = [BASE, *loras]
    manager = RewardManager(config.reward, cluster)
    batches, each = plan_validation(config, prompts, 0), config.validation.images_per_prompt
    count = min(cluster.processes, -(-len(batches) * images // each) * len(variants))
    workers = cluster.workers(
        "worker",
        EvaluationWorker,
        count,
        lambda rank: (config, loras, cluster.worker_device(rank), cluster.threads),
        gpus=cluster.gpus,
        threads=cluster.threads,
    )
    with waiting(f"loading {config.model.path} on {count} worker(s)", Downloads()):
        notes = workers.run(EvaluationWorker.setup, workers.remote)[0]
    texts = list(dict.fromkeys(prompt.text for prompt in prompts))
    cut = workers.submit(0, EvaluationWorker.cut_prompts, texts, prompts[0]).result()
    logged = set[str]()
    for sentence in [*notes, *sentences(cut, texts)]:
        logger.info("%s", sentence)

    def submit(tasks: Sequence[Task], i: int) -> Pending[Images]:
        return workers.submit(i % count, EvaluationWorker.sample, i, *tasks[i])

    for start in range(0, len(batches), count):
        tasks = [task for batch in batches[start : start + count] for task in plan(batch, variants, images, each)]
        dispatch = RoundRobin(partial(submit, tasks), count, len(tasks))
        rollouts = PendingRollout(manager, [samples for _, samples in tasks], dispatch)
        scored = zip(tasks, rollouts.finish(), rollouts.images, strict=True)
        rows = [row for task, scores, done in scored for row in scored_rows(*task, scores, done.result())]
        for note in dict.fromkeys(note for noted in workers.run(EvaluationWorker.take_notes) for note in noted):
            if note not in logged:
                logger.warning("%s", note)
                logged.add(note)
        yield rows
