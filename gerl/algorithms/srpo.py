"""SRPO (arXiv 2509.06942): finished images noised again, one step, and the clean image recovered with the known noise.

The noise is the one that the image was sampled from. One step denoises to a noise level from a higher one, another
inverts to it from a lower one; both are undone by the known noise, so that early levels have a sharp image too. The
reward is relative: with a wanted word before the prompt less that with an unwanted one, and the other way round where
a step inverts. Effects common to both, such as a style that the reward model prefers for any prompt, cancel.
"""

from __future__ import annotations  # torch is imported lazily

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from gerl.algorithms.common import requires, sampled_noise
from gerl.algorithms.lazily import FlowRule, ReplayedStep, Tape, torch, transitions
from gerl.algorithms.reward_gradient import (
    LatentJump,
    RewardEvaluation,
    RewardGradient,
    RewardGradientConfig,
    Score,
    flow_rule,
    generator,
    step_by,
)
from gerl.config.schema import key
from gerl.errors import ConfigError, ReplayError
from gerl.protocol import Prompt, Sample

PURE = 0.99  # noise level above which the first latents are the noise


@requires(deterministic=True, min_steps=3, leaps=True)
@dataclass(frozen=True)
class SRPOConfig(RewardGradientConfig):
    """The keys of SRPO."""

    positive: list[str] = key(
        ["Natural-lighting", "Detail", "Detailed", "Real"],
        "words for what is wanted; one, selected at random each step",
    )
    negative: list[str] = key(
        ["Concept art", "Painting", "Anime", "Flat", "Oil"],
        "words for what is not wanted; one, selected at random each step",
    )
    levels: list[float] = key([0.75, 0.964], "lowest and highest noise level of the two steps of a trainer step")
    span: float = key(
        0.022,
        "length of a leap in noise level, as closely as the sampler's levels allow: from this far above and below "
        "a level, selected at random each step, both lead to it",
        above=0,
        high=0.5,
    )
    strength: list[float] = key(
        [0.1, 0.25],
        "in the denoising branch the reward with the positive word has the weight 1 + this: at the lowest and at the "
        "highest of algorithm.levels",
    )
    inverted_strength: list[float] = key([0.3, 0.01], "the same when inverting, for the reward with the negative word")

    def check(self) -> None:
        super().check()
        for name in ("positive", "negative"):
            if not all(word.strip() for word in getattr(self, name) or [""]):
                raise ConfigError(f"algorithm.{name}={getattr(self, name)}: expected at least one word, and none empty")
        for name in ("strength", "inverted_strength"):
            if len(getattr(self, name)) != 2:
                raise ConfigError(
                    f"algorithm.{name}={getattr(self, name)}: expected two numbers, at the lowest and highest "
                    "noise level"
                )
        if len(self.levels) != 2 or not 0 <= self.levels[0] < self.levels[1] < 1:
            raise ConfigError(
                f"algorithm.levels={list(self.levels)}: expected the lowest and the highest noise level, from 0 to "
                "below 1"
            )


class SRPO(RewardGradient):
    """A denoising step and an inversion step to the same noise level, sampled anew each trainer step."""

    names = "srpo"
    settings: SRPOConfig

    def differentiated_steps(self, step: int) -> tuple[int, ...]:
        return tuple(range(self.config.sampling.num_inference_steps))  # two steps, see `starts`

    def starts(self, sigmas: Sequence[float], step: int) -> tuple[int, int]:
        """Return the steps from which a trainer step denoises and inverts, for the noise levels `sigmas`."""
        (low, high), span = self.settings.levels, self.settings.span
        within = [k for k, sigma in enumerate(sigmas) if low - 1e-3 <= sigma <= high + 1e-3]
        if len(within) < 2:
            shown = ", ".join(f"{sigma:.3f}" for sigma in sigmas)
            raise ReplayError(
                f"algorithm.levels=[{low}, {high}]: it contains fewer than two of the noise levels of this run "
                f"({shown}); widen it, or raise sampling.num_inference_steps"
            )
        pairs = [
            (a, min(within[i + 1 :], key=lambda b: abs(sigmas[a] - sigmas[b] - 2 * span)))
            for i, a in enumerate(within[:-1])
        ]
        level = generator(self.config.trainer.seed, step).uniform(low, high)
        return min(pairs, key=lambda pair: abs(midpoint(sigmas, pair) - level))

    def evaluations(self, tape: Tape, trained: tuple[int, ...], samples: Sequence[Sample]) -> list[RewardEvaluation]:
        settings, step = self.settings, samples[0].step
        rules = [flow_rule(tape, k, settings.name) for k in trained]
        sigmas = [rule.sigma for rule in rules]
        above, below = self.starts(sigmas, step)
        goal = midpoint(sigmas, (above, below))
        finished = tape.steps[-1].x_next
        noise = tape.steps[0].x
        if tape.steps[0].rule.sigma < PURE:  # image-to-image: the first latents are not noise
            noise = sampled_noise(finished, [("srpo", s.seed) for s in samples])
        rng = generator(self.config.trainer.seed, step, "words")
        wanted, unwanted = (str(rng.choice(words)) for words in (settings.positive, settings.negative))
        evaluations = []
        for k, strength, words in (
            (above, settings.strength, (wanted, unwanted)),
            (below, settings.inverted_strength, (unwanted, wanted)),
        ):
            counts = 1 + float(np.interp(min(sigmas[k], goal), settings.levels, strength))
            recover = partial(recovered, transitions.leap(rules[k], goal), noise)
            hop = LatentJump(trained[k], recover, latents=rules[k].noised(finished, noise))
            evaluations.append(RewardEvaluation((hop,), at=hop, weights=0.5, score=self._relative(counts, *words)))
        return evaluations

    def _relative(self, counts: float, first: str, second: str) -> Score:
        """Return `counts` times the reward with the word `first` before the prompt minus that with `second`."""

        def score(images: torch.Tensor, prompts: Sequence[Prompt]) -> torch.Tensor:
            one, other = ([replace(p, text=f"{word}. {p.text}") for p in prompts] for word in (first, second))
            return counts * self.reward(images, one) - self.reward(images, other)

        return score


def midpoint(sigmas: Sequence[float], pair: tuple[int, int]) -> float:
    """Return the noise level halfway between those of two steps."""
    return (sigmas[pair[0]] + sigmas[pair[1]]) / 2


def recovered(rule: FlowRule, noise: torch.Tensor, step: ReplayedStep) -> torch.Tensor:
    """Return the clean latents behind those that `rule` leads to, given their noise."""
    s = rule.sigma_next
    return (step_by(rule, step) - s * noise) / (1 - s)
