"""SRPO (arXiv 2509.06942): finished images noised again, one step, and the clean image recovered by the known noise.

The noise is the one that the image was drawn from. One step denoises from a level to a lower one, another inverts from
there; both are undone by the known noise, so that early levels have a sharp image too. The reward is relative: with a
wanted word before the prompt less that with an unwanted one, and the other way round where a step inverts. What moves
both, as shifts in style that a reward model likes whatever the prompt, cancels.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from gerl.algorithms.gradient_paths import by_rule, drawn_noise
from gerl.algorithms.reward_gradient import Hop, Look, RewardGradient, Score, flow_rule
from gerl.algorithms.surrogates import generator
from gerl.config.reward_gradients import SRPOConfig
from gerl.engine import ReplayedStep, Tape
from gerl.engine.kernels import FlowRule, leap
from gerl.protocol import Prompt, Sample

PURE = 0.99  # noise level from which on the first latents are the noise


class SRPO(RewardGradient):
    """A step of denoising and one of inversion between two levels, drawn anew each trainer step."""

    settings: SRPOConfig

    def drawn(self, step: int) -> tuple[int, ...]:
        total = self.config.sampling.num_inference_steps
        length = max(1, round(self.settings.span * total))
        draw = generator(self.config.trainer.seed, step)
        first = int(draw.integers(1, max(2, total - length)))  # at level 1 nothing of the image is left to recover
        return first, min(first + length, total - 1)

    def looks(self, tape: Tape, trained: tuple[int, ...], samples: Sequence[Sample]) -> list[Look]:
        settings = self.settings
        high, low = (flow_rule(tape, k, settings.name) for k in trained)
        finished = tape.steps[-1].x_next
        noise = tape.steps[0].x
        if tape.steps[0].rule.sigma < PURE:  # it begins from a picture
            noise = drawn_noise(finished, [("srpo", s.seed) for s in samples])
        draw = generator(self.config.trainer.seed, samples[0].step, "words")
        wanted, unwanted = (str(draw.choice(words)) for words in (settings.positive, settings.negative))
        looks = []
        for (k, rule, goal), strength, words in (
            ((trained[0], high, low), settings.strength, (wanted, unwanted)),
            ((trained[1], low, high), settings.inverted_strength, (unwanted, wanted)),
        ):
            counts = 1 + strength[0] + (strength[1] - strength[0]) * rule.sigma
            recover = partial(recovered, leap(rule, goal.sigma), noise)
            hop = Hop(k, recover, latents=rule.noised(finished, noise))
            looks.append(Look((hop,), at=hop, weights=0.5, score=self._relative(counts, *words)))
        return looks

    def _relative(self, counts: float, first: str, second: str) -> Score:
        """`counts` times the reward of a prompt after the one word, less that after the other."""

        def score(images: torch.Tensor, prompts: Sequence[Prompt]) -> torch.Tensor:
            one, other = ([worded(prompt, word) for prompt in prompts] for word in (first, second))
            return counts * self.reward(images, one) - self.reward(images, other)

        return score


def worded(prompt: Prompt, word: str) -> Prompt:
    """`prompt` with a word before its text."""
    return replace(prompt, text=f"{word}. {prompt.text}")


def recovered(rule: FlowRule, noise: torch.Tensor, step: ReplayedStep) -> torch.Tensor:
    """The clean latents of those that `rule` leads to, of which the noise is known."""
    s = rule.sigma_next
    return (by_rule(rule, step) - s * noise) / (1 - s)
