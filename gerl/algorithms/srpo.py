"""SRPO (arXiv 2509.06942): finished images noised again, one step, and the clean image recovered by the known noise.

The noise is the one that the image was drawn from. One step denoises to a noise level from a higher one, another
inverts to it from a lower one; both are undone by the known noise, so that early levels have a sharp image too. The
reward is relative: with a wanted word before the prompt less that with an unwanted one, and the other way round where a
step inverts. What moves both, as shifts in style that a reward model likes whatever the prompt, cancels.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from gerl.algorithms.gradient_paths import by_rule, drawn_noise
from gerl.algorithms.reward_gradient import Hop, Look, RewardGradient, Score, flow_rule
from gerl.algorithms.surrogates import generator
from gerl.config.reward_gradients import SRPOConfig
from gerl.engine import ReplayedStep, Tape
from gerl.engine.kernels import FlowRule, leap
from gerl.errors import ReplayError
from gerl.protocol import Prompt, Sample

PURE = 0.99  # noise level from which on the first latents are the noise


class SRPO(RewardGradient):
    """A step of denoising and one of inversion to the same noise level, drawn anew each trainer step."""

    settings: SRPOConfig

    def drawn(self, step: int) -> tuple[int, ...]:
        return tuple(range(self.config.sampling.num_inference_steps))  # two of them, by noise levels: see `starts`

    def starts(self, sigmas: Sequence[float], step: int) -> tuple[int, int]:
        """The steps that a trainer step denoises and inverts from, of the noise levels `sigmas`."""
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
        return min(pairs, key=lambda pair: abs(middle(sigmas, pair) - level))

    def looks(self, tape: Tape, trained: tuple[int, ...], samples: Sequence[Sample]) -> list[Look]:
        settings, step = self.settings, samples[0].step
        rules = [flow_rule(tape, k, settings.name) for k in trained]
        sigmas = [rule.sigma for rule in rules]
        above, below = self.starts(sigmas, step)
        goal = middle(sigmas, (above, below))
        finished = tape.steps[-1].x_next
        noise = tape.steps[0].x
        if tape.steps[0].rule.sigma < PURE:  # it begins from a picture
            noise = drawn_noise(finished, [("srpo", s.seed) for s in samples])
        draw = generator(self.config.trainer.seed, step, "words")
        wanted, unwanted = (str(draw.choice(words)) for words in (settings.positive, settings.negative))
        looks = []
        for k, strength, words in (
            (above, settings.strength, (wanted, unwanted)),
            (below, settings.inverted_strength, (unwanted, wanted)),
        ):
            counts = 1 + float(np.interp(min(sigmas[k], goal), settings.levels, strength))
            recover = partial(recovered, leap(rules[k], goal), noise)
            hop = Hop(trained[k], recover, latents=rules[k].noised(finished, noise))
            looks.append(Look((hop,), at=hop, weights=0.5, score=self._relative(counts, *words)))
        return looks

    def _relative(self, counts: float, first: str, second: str) -> Score:
        """`counts` times the reward of a prompt after the one word, less that after the other."""

        def score(images: torch.Tensor, prompts: Sequence[Prompt]) -> torch.Tensor:
            one, other = ([worded(prompt, word) for prompt in prompts] for word in (first, second))
            return counts * self.reward(images, one) - self.reward(images, other)

        return score


def middle(sigmas: Sequence[float], pair: tuple[int, int]) -> float:
    """The noise level halfway between those of two steps."""
    return (sigmas[pair[0]] + sigmas[pair[1]]) / 2


def worded(prompt: Prompt, word: str) -> Prompt:
    """`prompt` with a word before its text."""
    return replace(prompt, text=f"{word}. {prompt.text}")


def recovered(rule: FlowRule, noise: torch.Tensor, step: ReplayedStep) -> torch.Tensor:
    """The clean latents of those that `rule` leads to, of which the noise is known."""
    s = rule.sigma_next
    return (by_rule(rule, step) - s * noise) / (1 - s)
