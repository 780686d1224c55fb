"""A policy gradient and a reward gradient in one update, by weights.

The policy gradient (Flow-GRPO) learns from all scorers by their advantages; the scorers that have a gradient give it
besides, through the last steps (DRaFT). A scorer without one, such as OCR, counts by the former alone.
"""

from __future__ import annotations  # of the model, which the driver of a run does not have

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from gerl.algorithms.base import Batch, KLWeight, Rewards
from gerl.algorithms.flow_grpo import FlowGRPO
from gerl.algorithms.gradient_paths import DRaFT
from gerl.algorithms.reward_gradient import Look
from gerl.algorithms.step_gradients import StepGradients
from gerl.config import Config
from gerl.config.reward_gradients import MixedGradientConfig
from gerl.engine import ReplayedStep, Tape
from gerl.protocol import Sample, StepFacts, UpdateStats

if TYPE_CHECKING:
    from gerl.model.policy import Policy


class MixedGradient(DRaFT):
    """Flow-GRPO on the stochastic steps, and DRaFT-K on the last ones."""

    settings: MixedGradientConfig

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.policy_gradient = FlowGRPO(config)
        self.reads_means = self.policy_gradient.reads_means

    def trained_steps(self, window: tuple[int, ...], step: int) -> tuple[int, ...]:
        return tuple(sorted({*self.policy_gradient.trained_steps(window, step), *self.drawn(step)}))

    def credit(self, rewards: Rewards) -> torch.Tensor:
        return self.policy_gradient.credit(rewards)

    def state(self) -> dict[str, Any]:
        return self.policy_gradient.state()

    def load_state(self, state: dict[str, Any]) -> None:
        self.policy_gradient.load_state(state)

    def set_kl_weight(self, pull: KLWeight | None) -> None:
        super().set_kl_weight(pull)
        self.policy_gradient.set_kl_weight(pull)

    def log_ratio(self, step: ReplayedStep) -> torch.Tensor:
        return self.policy_gradient.log_ratio(step)

    def kl_to_base(self, policy: Policy, batch: Batch) -> torch.Tensor:
        return self.policy_gradient.kl_to_base(policy, replace(batch, trained=stochastic(batch)))

    def step_facts(self, tape: Tape, trained: tuple[int, ...]) -> list[StepFacts]:
        return self.policy_gradient.step_facts(tape, tuple(k for k in trained if tape.steps[k].rule.std > 0))

    def looks(self, tape: Tape, trained: tuple[int, ...], samples: Sequence[Sample]) -> list[Look]:
        return super().looks(tape, self.drawn(samples[0].step), samples)

    def train(
        self, policy: Policy, batch: Batch, rows: list[int], num_pairs: float, meter: StepGradients[Any] | None = None
    ) -> UpdateStats:
        settings, images = self.settings, num_pairs / len(batch.trained)
        own = replace(batch, trained=self.drawn(batch.samples[0].step))
        pairs = images * len(own.trained) / settings.gradient_weight
        by_reward = super().train(policy, own, rows, pairs)
        noisy = replace(batch, trained=stochastic(batch))
        pairs = images * len(noisy.trained) / settings.policy_weight
        by_ratio = self.policy_gradient.train(policy, noisy, rows, pairs, meter)  # which measures this part
        return together(by_ratio, by_reward)

    def _stay_near(self, policy: Policy, batch: Batch, rows: list[int], num_pairs: float) -> dict[str, float]:
        return {}  # the policy gradient does


def stochastic(batch: Batch) -> tuple[int, ...]:
    """The trained steps that drew noise."""
    return tuple(k for k in batch.trained if batch.tape.steps[k].rule.std > 0)


def together(by_ratio: UpdateStats, by_reward: UpdateStats) -> UpdateStats:
    """The averages of both over the pairs of the first; their losses are told apart."""
    share = by_ratio.pairs / by_reward.pairs
    sums = {name.replace("loss", "reward_loss"): value * share for name, value in by_reward.sums.items()}
    return replace(by_ratio, sums=by_ratio.sums | sums)
