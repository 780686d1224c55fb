"""Reward gradients through the last steps: DRaFT, DRaFT-LV, ReFL and DRTune, and DRaFT with a policy gradient.

Sources, and differences from the publications: `configs/algorithm/` and `docs/algorithms.md`.
"""

from __future__ import annotations  # torch is imported lazily

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gerl.algorithms.base import Batch, Rewards
from gerl.algorithms.common import predicted, sampled_noise
from gerl.algorithms.flow_grpo import FlowGRPO, FlowGRPOConfig
from gerl.algorithms.lazily import Policy, StepGradients, Tape, torch
from gerl.algorithms.reward_gradient import (
    LatentJump,
    RewardEvaluation,
    RewardGradient,
    RewardGradientConfig,
    chain,
    generator,
    mean,
)
from gerl.config.algorithms import Needs
from gerl.config.schema import key, main_key
from gerl.protocol import Sample, StepFacts, UpdateStats


@dataclass(frozen=True)
class DRaFTConfig(RewardGradientConfig):
    """Keys of DRaFT."""

    last: int = main_key(1, "denoising steps, counted from the last, that the gradient passes through", low=1)
    last_std: float = key(0.0, "std of the number of steps around `last`, sampled anew each trainer step", low=0)

    @property
    def needs(self) -> Needs:
        return replace(super().needs, latent_gradient=self.last > 1 or self.last_std > 0)


@dataclass(frozen=True)
class DRaFTLVConfig(RewardGradientConfig):
    """Keys of DRaFT-LV."""

    noised_copies: int = key(2, "times a finished image is noised to the last step's level and it is repeated", low=1)


@dataclass(frozen=True)
class ReFLConfig(RewardGradientConfig):
    """Keys of ReFL."""

    late: int = main_key(10, "the step whose predicted image is scored is one of this many last ones", low=1)


@dataclass(frozen=True)
class MixedGradientConfig(DRaFTConfig, FlowGRPOConfig):
    """Keys of a policy gradient of the total reward plus the gradient of its differentiable part."""

    policy_weight: float = key(1.0, "weight of the policy gradient", above=0)
    gradient_weight: float = key(1.0, "weight of the reward's gradient", above=0)

    @property
    def needs(self) -> Needs:
        alone = self.history > 0 or self.adv_estimator == "reinforce_pp"
        return replace(super().needs, single_images=alone, values=False)  # some trained steps have no noise


class DRaFT(RewardGradient):
    """DRaFT-K (arXiv 2309.17400), the last K steps; AlignProp (arXiv 2310.03739) samples K each trainer step."""

    names = "draft alignprop"
    settings: DRaFTConfig

    def differentiated_steps(self, step: int) -> tuple[int, ...]:
        total, rng = self.config.sampling.num_inference_steps, generator(self.config.trainer.seed, step)
        length = sampled_length(self.settings.last, self.settings.last_std, total, rng)
        return tuple(range(total - length, total))

    def evaluations(self, tape: Tape, trained: tuple[int, ...], samples: Sequence[Sample]) -> list[RewardEvaluation]:
        return [RewardEvaluation(chain(tape, dict.fromkeys(trained, (mean, 1.0))))]


class DRaFTLV(RewardGradient):
    """DRaFT-LV (arXiv 2309.17400): the last step, and repetitions of it from re-noised final images."""

    names = "draft_lv"
    settings: DRaFTLVConfig

    def differentiated_steps(self, step: int) -> tuple[int, ...]:
        return (self.config.sampling.num_inference_steps - 1,)

    def evaluations(self, tape: Tape, trained: tuple[int, ...], samples: Sequence[Sample]) -> list[RewardEvaluation]:
        (last,), count = trained, self.settings.noised_copies + 1
        evaluations = [RewardEvaluation(chain(tape, {last: (mean, 0.0)}), weights=1 / count)]
        rule, finished = tape.steps[last].rule, tape.steps[-1].x_next
        for copy in range(1, count):
            noise = sampled_noise(finished, [("low variance", copy, s.seed) for s in samples])
            hop = LatentJump(last, predicted, latents=rule.noised(finished, noise))
            evaluations.append(RewardEvaluation((hop,), at=hop, weights=1 / count))
        return evaluations


class ReFL(RewardGradient):
    """ReFL (arXiv 2304.05977): the image predicted at a late step that is sampled each trainer step."""

    names = "refl"
    settings: ReFLConfig

    def differentiated_steps(self, step: int) -> tuple[int, ...]:
        return (late_step(self, self.settings.late, step),)

    def evaluations(self, tape: Tape, trained: tuple[int, ...], samples: Sequence[Sample]) -> list[RewardEvaluation]:
        hop = LatentJump(trained[0], predicted)
        return [RewardEvaluation((hop,), at=hop)]


def sampled_length(mean: int, std: float, total: int, rng: np.random.Generator) -> int:
    """Sample a number of steps from a normal distribution around `mean`, truncated to 1 to `total`; `mean` at std 0."""
    while std > 0:
        length = round(rng.normal(mean, std))
        if 1 <= length <= total:
            return length
    return min(mean, total)


def late_step(algorithm: RewardGradient, last: int, step: int) -> int:
    """Sample one of the last steps for trainer step `step`."""
    total = algorithm.config.sampling.num_inference_steps
    rng = generator(algorithm.config.trainer.seed, step)
    return int(rng.integers(total - min(last, total), total))


# --- A weighted sum of a policy gradient and a reward gradient in one update.
#
# The policy gradient (Flow-GRPO) uses the advantages of all scorers. Differentiable scorers add their gradient through
# the last steps (DRaFT); others, such as OCR, count only in the policy gradient.


class MixedGradient(DRaFT, FlowGRPO):
    """Flow-GRPO on the stochastic steps, and DRaFT-K on the last steps."""

    names = "mixed_gradient"
    settings: MixedGradientConfig

    def trained_steps(self, window: tuple[int, ...], step: int) -> tuple[int, ...]:
        return tuple(sorted({*FlowGRPO.trained_steps(self, window, step), *self.differentiated_steps(step)}))

    def credit(self, rewards: Rewards) -> torch.Tensor:
        return FlowGRPO.credit(self, rewards)

    def kl_to_base(self, policy: Policy, batch: Batch) -> torch.Tensor:
        return super().kl_to_base(policy, replace(batch, trained=stochastic(batch)))

    def step_facts(self, tape: Tape, trained: tuple[int, ...]) -> list[StepFacts]:
        return super().step_facts(tape, tuple(k for k in trained if tape.steps[k].rule.std > 0))

    def evaluations(self, tape: Tape, trained: tuple[int, ...], samples: Sequence[Sample]) -> list[RewardEvaluation]:
        return super().evaluations(tape, self.differentiated_steps(samples[0].step), samples)

    def train(
        self, policy: Policy, batch: Batch, rows: list[int], num_pairs: float, meter: StepGradients[Any] | None = None
    ) -> UpdateStats:
        settings, images = self.settings, num_pairs / len(batch.trained)
        differentiated = replace(batch, trained=self.differentiated_steps(batch.samples[0].step))
        pairs = images * len(differentiated.trained) / settings.gradient_weight
        by_reward = DRaFT.train(self, policy, differentiated, rows, pairs)
        noisy = replace(batch, trained=stochastic(batch))
        pairs = images * len(noisy.trained) / settings.policy_weight
        by_ratio = FlowGRPO.train(self, policy, noisy, rows, pairs, meter)  # the meter measures this part only
        share = by_ratio.pairs / by_reward.pairs  # both as averages over the same pairs
        sums = {name.replace("loss", "reward_loss"): value * share for name, value in by_reward.sums.items()}
        return replace(by_ratio, sums=by_ratio.sums | sums)

    def _add_kl_gradient(self, policy: Policy, batch: Batch, rows: list[int], num_pairs: float) -> dict[str, float]:
        return {}  # included in the policy gradient


def stochastic(batch: Batch) -> tuple[int, ...]:
    """Return the trained steps with noise."""
    return tuple(k for k in batch.trained if batch.tape.steps[k].rule.std > 0)
