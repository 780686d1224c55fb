"""The role that rewrites prompts: it samples texts with a language model, stores their tokens and trains on them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from gerl.algorithms.token_grpo import TextTape, TokenGRPO
from gerl.commandline.command import importing
from gerl.protocol import Images, ModelFacts, RolloutTask, Sample
from gerl.utils.seeding import seed_everything
from gerl.workers.roles import OtherRole, RoleWorker

if TYPE_CHECKING:
    from gerl.model.language import LanguageModel
    from gerl.model.policy import Policy


class Rewriter(OtherRole):
    """Role with a causal language model and a LoRA on it."""

    def __init__(self, name: str, first: RoleWorker) -> None:
        super().__init__(name, first)
        self.text = first.config.episode.text_role(name)

    def setup(self, remote: bool = False) -> ModelFacts:
        with importing():  # imported lazily: the driver needs neither transformers nor peft
            from gerl.engine.record import count_evaluations
            from gerl.model.errors import model_errors
            from gerl.workers.actor import Actor, snapshots_of

        with model_errors("loading"):
            self.policy = self.load_policy()
        self.evaluations = count_evaluations(())
        self.algorithm = TokenGRPO(self.config)
        self.actor = Actor(self.policy, self.config.actor, self.algorithm, self.total_updates)
        self.actor.say = self.notes.append
        self.snapshots = snapshots_of(self.actor)
        self.ended = 0
        count = sum(p.numel() for p in self.policy.trained.values())
        kind = type(self.model.model).__name__
        return ModelFacts(kind, list(self.policy.denoisers), count, False, self.policy.fingerprint, [], None, [], [])

    def load_policy(self) -> Policy:
        from gerl.model.language import load_language_policy  # imported lazily, as in `setup`

        return load_language_policy(self.config, self.device, self.text.temperature, self.text.tokens)

    @property
    def model(self) -> LanguageModel:
        """The language model."""
        return self.policy.pipe

    def active(self) -> AbstractContextManager[None]:
        return nullcontext()

    def sample(self, task: RolloutTask) -> Images:
        """Sample a text per sample of `task`, which has one prompt, and store their tokens; the first ones are kept."""
        from gerl.engine import Trajectory

        start, step = time.perf_counter(), task.samples[0].step
        if self.ended:
            self.snapshots.begin(self.ended)
        seed_everything("rollout", self.config.trainer.seed, step, task.id)
        texts, tape = self.rewritten(task.samples)
        self.trajectories[task.id] = Trajectory(task, (tape,), self.policy.version, self.rank)  # type: ignore[arg-type]
        return Images(task.id, texts, time.perf_counter() - start)

    def rewritten(self, samples: Sequence[Sample]) -> tuple[list[str], TextTape]:
        """Return the texts of `samples` of one prompt, and their tape; an empty text means the prompt itself."""
        prompt = self.model.encode(samples[0].prompt.request)
        tokens, mask = self.model.sample(prompt, [sample.seed for sample in samples])
        kept = torch.tensor([sample.index < self.text.kept for sample in samples], device=mask.device)
        mask = mask & ~kept[:, None]
        with torch.no_grad():
            log_probs = self.model.log_probs(prompt, tokens)
        texts = self.model.decode(tokens, mask)
        found = [text or sample.prompt.text for text, sample in zip(texts, samples, strict=True)]
        return found, TextTape(prompt, tokens, mask, log_probs)

    def validate(self, task_id: int, samples: Sequence[Sample]) -> Images:
        """Rewrite held-out prompts with the averaged weights."""
        start, texts = time.perf_counter(), list[str]()
        with self.policy.ema.swapped_in():
            for sample in samples:
                texts += self.rewritten([replace(sample, index=self.text.kept)])[0]
        return Images(task_id, texts, time.perf_counter() - start)
