"""The base model as a judge of sampled images: does it see the prompt in them, and does it find them likely?"""

from __future__ import annotations  # annotations name diffusers classes, which the driver of a run does not import

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np
import torch

from gerl.algorithms.common import sampled_noise
from gerl.config import Config, ScorerConfig
from gerl.config.blocks import RunPart
from gerl.engine import Tape
from gerl.engine.denoising_error import denoising_errors, differentiable_errors, structure_of
from gerl.errors import ModelError, ReplayError
from gerl.model.errors import release
from gerl.protocol import Prompt, Sample
from gerl.rewards.gradients import rescaled_tensor
from gerl.rewards.total import applies
from gerl.run.validation import JUDGED
from gerl.utils.files import first_line
from gerl.workers.rollout import REFUSALS, FinishedCall, Rollout

logger = logging.getLogger(__name__)
FLOOR = 0.1  # of errors in the scorer, whose outputs have variances near 1: smaller differences hardly count


@dataclass
class BaseJudge:
    """Denoising errors of finished latents under the base model: the weights before training.

    own_error: under the image's own prompt. other_error: under another prompt (`Prompt.contrast`). Both are geometric
    means over the noise levels. The noise depends on the prompt only, so that images of a prompt, at any step, on any
    worker, can be compared. `draws`: of the noise, per noise level.
    """

    rollout: Rollout
    draws: int
    refused: str = ""  # why the pipeline's images cannot be judged

    @classmethod
    def of(cls, rollout: Rollout, config: Config) -> BaseJudge:
        """Return the judge of a run's workers, for the guard and the scorer `base_alignment`."""
        scorers = [scorer for part in get_args(RunPart) if (scorer := config.reward.by_latents(part)) is not None]
        draws = [int(scorer.kwargs.get("draws", 1)) for scorer in scorers]
        return cls(rollout, max([*draws, config.guard.judge_draws if config.judges else 1]))

    def scores(self, errors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the columns of the scorer `base_alignment`; raises `ModelError` if the `errors` are unknown."""
        under_prompt, other = (errors[name] for name in JUDGED)
        if self.refused:
            raise ModelError(f"reward.scorers.base_alignment cannot score this pipeline's images: {self.refused}")
        return {
            "base_alignment": np.log((other + FLOOR) / (under_prompt + FLOOR)),
            "base_alignment/surprise": np.log(under_prompt),
        }

    def __call__(self, calls: Sequence[FinishedCall], occasion: int = 0) -> dict[str, np.ndarray]:
        """Return `own_error` and `other_error` of all samples, `[B]` fp32; NaN if they cannot be judged.

        occasion: the trainer step of training images, which changes the noise.
        """
        parts = [self._judged(call, occasion) for call in calls]
        return {name: np.concatenate([part[i] for part in parts]) for i, name in enumerate(JUDGED)}

    def _judged(self, call: FinishedCall, occasion: int) -> tuple[np.ndarray, np.ndarray]:
        unknown = np.full(len(call.samples), np.nan, np.float32)
        if self.refused:
            return unknown, unknown
        try:
            with self.rollout.policy.first():
                under_prompt = self._errors(call, call.samples, occasion)
                contrasted = [s.prompt.contrast for s in call.samples]
                other = self._errors(call, _with_texts(call.samples, contrasted), occasion) if all(contrasted) else None
        except (ReplayError, ModelError, MemoryError, *REFUSALS) as error:  # a measurement must not end a run
            if self.rollout.lockstep and not isinstance(error, ReplayError | ModelError):
                raise  # other ranks wait for this one, or have died
            self.refused = first_line(error)
            logger.warning("the base model cannot judge this pipeline's images (guard.judge): %s", self.refused)
            release(error)
            return unknown, unknown
        mean_error = geometric_mean(under_prompt).cpu().numpy()
        return mean_error, unknown if other is None else geometric_mean(other).cpu().numpy()

    def _errors(self, finished: FinishedCall, samples: Sequence[Sample], occasion: int) -> torch.Tensor:
        latents = finished.latents
        if latents is None:
            raise ReplayError("it denoises with copies of its scheduler, each at its own noise level")

        def noise(i: int, like: torch.Tensor) -> torch.Tensor:
            return sampled_noise(like, [("judge", occasion, sample.prompt.id, i) for sample in samples])

        def errors(call: dict[str, object]) -> torch.Tensor:
            pipe = self.rollout.policy.pipe
            structure = structure_of(pipe, call, finished.steps, finished.generators())
            return denoising_errors(pipe, structure, latents, noise, self.draws)

        return finished.again(errors, samples)


class LatentReward:
    """The scorer `base_alignment` as a differentiable part of the reward, weighted as `config` says."""

    def __init__(self, judge: BaseJudge, config: ScorerConfig) -> None:
        self.judge, self.config = judge, config

    def __call__(self, tape: Tape, latents: torch.Tensor, prompts: Sequence[Prompt]) -> torch.Tensor:
        """Return the weighted scores `[B]` of clean `latents` `[B, ...]` of the call on `tape`; 0: not applicable."""
        judge, policy = self.judge, self.judge.rollout.policy
        applicable = torch.tensor([applies(self.config, prompt) for prompt in prompts], device=latents.device)

        def noise(i: int, like: torch.Tensor) -> torch.Tensor:
            return sampled_noise(like, [("judge gradient", policy.version, prompt.id, i) for prompt in prompts])

        def errors(texts: list[str]) -> torch.Tensor:
            prompt = texts[0] if isinstance(tape.call["prompt"], str) else texts
            structure = structure_of(policy.pipe, tape.call | {"prompt": prompt}, len(tape.steps))
            return geometric_mean(differentiable_errors(policy.pipe, structure, latents, noise, judge.draws))

        with policy.first(), constant(policy.trained.values() if policy.whole else ()):
            under_prompt, other = errors([p.text for p in prompts]), errors([p.contrast for p in prompts])
        scores = ((other + FLOOR) / (under_prompt + FLOOR)).log()
        return torch.where(applicable, self.config.weight * rescaled_tensor(self.config, scores), 0.0)


@contextlib.contextmanager
def constant(parameters: Iterable[torch.nn.Parameter]) -> Iterator[None]:
    """Exclude `parameters` from gradients in the block."""
    changed = [p for p in parameters if p.requires_grad]
    for p in changed:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in changed:
            p.requires_grad_(True)


def geometric_mean(errors: torch.Tensor) -> torch.Tensor:
    """Return the mean over the noise levels, `[B, L]` -> `[B]`."""
    return errors.clamp_min(1e-12).log().mean(1).exp()


def _with_texts(samples: Sequence[Sample], texts: Sequence[str]) -> list[Sample]:
    return [replace(s, prompt=replace(s.prompt, text=text)) for s, text in zip(samples, texts, strict=True)]
