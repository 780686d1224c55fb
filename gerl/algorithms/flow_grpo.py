"""Flow-GRPO (arXiv 2505.05470): every image has a trajectory of its own, whose stochastic steps share its advantage.

Flow-GRPO-Fast, DanceGRPO, MixGRPO and DDPO differ in how they sample (`configs/algorithm/`) and are this class.
"""

from __future__ import annotations  # of the model, which the driver of a run does not have

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from pydantic import TypeAdapter, ValidationError

from gerl.algorithms.base import Batch, Rewards
from gerl.algorithms.planning import drawn_steps
from gerl.algorithms.policy_gradient import PolicyGradient
from gerl.config import Config
from gerl.config.policy_gradients import ChainConfig, FlowGRPOConfig
from gerl.engine import ReplayedStep, Tape, replay
from gerl.errors import CheckpointError

if TYPE_CHECKING:
    from gerl.model.policy import Policy


class FlowGRPO(PolicyGradient):
    """The clipped surrogate on the steps of independent trajectories."""

    settings: ChainConfig
    scores_means: ClassVar[bool] = False  # the guided update compares means, not only log-probabilities

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        subtracts_kl = self.settings.subtracts_kl and config.has_kl
        self.reads_means = subtracts_kl or (self.scores_means and self.settings.cfg != "off")
        self.past: dict[int, list[float]] = {}  # prompt -> its latest rewards, where `algorithm.history` asks for them

    def trained_steps(self, window: tuple[int, ...], step: int) -> tuple[int, ...]:
        count = max(1, round(self.settings.timestep_fraction * len(window)))
        return window if count == len(window) else drawn_steps(window, count, self.config.trainer.seed, step)

    def proximal(self, policy: Policy, tape: Tape, options: dict[str, Any]) -> dict[int, torch.Tensor] | None:
        if not isinstance(self.settings, FlowGRPOConfig) or not self.settings.decoupled:
            return None
        found: dict[int, torch.Tensor] = {}
        began = policy.earlier[0]
        if policy.version > began.updates:  # else the present weights are those that the step began with
            with began.swapped_in():
                replay(policy.pipe, tape, lambda k, s: found.update({k: s.log_prob}), grad=False, **options)
        return found

    def kl_to_base(self, policy: Policy, batch: Batch) -> torch.Tensor:
        total = torch.zeros(len(batch.samples))

        def on_step(k: int, step: ReplayedStep) -> None:
            step = step.reached()
            assert step.recorded_mean is not None and step.recorded_log_prob is not None
            kl = self._kl(step, step.recorded_mean, step.recorded_log_prob)
            total.add_(kl.cpu() / len(batch.trained))

        with policy.base():
            replay(policy.pipe, batch.tape, on_step, steps=batch.trained, grad=False)
        return total

    def advantages(self, rewards: Rewards) -> torch.Tensor:
        size = self.settings.history
        if not size:
            return super().advantages(rewards)
        for sample, total in zip(rewards.samples, rewards.totals.tolist(), strict=True):
            self.past[sample.prompt.id] = [*self.past.get(sample.prompt.id, []), total][-size:]
        batch = rewards.totals.double()
        result = []
        for sample, total in zip(rewards.samples, batch, strict=True):
            past = self.past[sample.prompt.id]
            # too few rewards of this prompt say nothing yet: those of the batch do (DDPO)
            known = torch.tensor(past, dtype=torch.float64) if len(past) == size else batch
            result.append((total - known.mean()) / (known.std(correction=0) + 1e-4))
        return torch.stack(result).to(rewards.totals.dtype)

    def state(self) -> dict[str, Any]:
        return super().state() | {"past": {str(prompt): values for prompt, values in self.past.items()}}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        try:
            self.past = TypeAdapter(dict[int, list[float]]).validate_python(state.get("past", {}))
        except ValidationError:
            raise CheckpointError("state.json has no usable algorithm.past: prompt -> its latest rewards") from None
