"""Flow-GRPO and its variants that change the ratio or its bound: GRPO-Guard and Flow-DPPO."""

from __future__ import annotations  # torch is imported lazily

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from gerl.algorithms.base import Batch, DownSampledConfig, Rewards
from gerl.algorithms.core_algos import gaussian_kl, guard_log_ratio, masked_policy_loss, ratio_spread
from gerl.algorithms.planning import sampled_steps
from gerl.algorithms.policy_gradient import PolicyGradient, TrajectoryClipConfig, WeightedConfig
from gerl.config import Config
from gerl.config.algorithms import Needs
from gerl.config.blocks import StepLikelihood
from gerl.config.schema import key, main_key
from gerl.errors import CheckpointError, ConfigError
from gerl.utils.lazy import lazy

if TYPE_CHECKING:
    import torch

    from gerl import engine
    from gerl.engine import ReplayedStep, Tape
    from gerl.engine.transitions import Rule
    from gerl.model.policy import Policy
else:
    torch, engine = lazy("torch"), lazy("gerl.engine")


@dataclass(frozen=True)
class ChainConfig(WeightedConfig, DownSampledConfig):
    """Keys of algorithms with independent trajectories."""

    kl_in_reward: bool = key(False, "subtract the KL from the reward rather than add it to the loss")
    timestep_fraction: float = key(
        1.0, "share of the stochastic steps that are trained, selected at random each step", above=0, high=1
    )
    history: int = key(0, "rewards kept per prompt whose mean and std normalise; 0: those of the group", low=0)

    @property
    def needs(self) -> Needs:
        needs = super().needs
        return replace(needs, single_images=needs.single_images or self.history > 0, recorded_means=self.kl_in_reward)

    @property
    def subtracts_kl(self) -> bool:
        return self.kl_in_reward

    def check(self) -> None:
        super().check()
        if self.kl_in_reward and self.kl_type == "velocity":
            raise ConfigError(
                "algorithm.kl_in_reward=true: it uses values recorded in the rollout, which "
                f"kl_type={self.kl_type} cannot; use kl_type=gaussian, or put the KL in the loss"
            )


@dataclass(frozen=True)
class FlowGRPOConfig(ChainConfig, TrajectoryClipConfig):
    """Keys of Flow-GRPO."""

    likelihood: StepLikelihood = key(
        "gaussian",
        "log-likelihood of a step in the ratio: the Gaussian's, or -(x' - mean)^2, 2 std^2 times as steep (published "
        "with cps)",
    )
    decoupled: bool = key(
        False,
        "with trainer.staleness or rollout.quantize: clip the ratio to the weights at the start of the step rather "
        "than to the sampling weights, and weight it by the ratio of the two (AReaL)",
    )

    @property
    def needs(self) -> Needs:
        return replace(super().needs, start_weights=self.decoupled)

    @property
    def step_likelihood(self) -> StepLikelihood:
        return self.likelihood


@dataclass(frozen=True)
class GRPOGuardConfig(ChainConfig, TrajectoryClipConfig):
    """Keys of GRPO-Guard."""

    @property
    def needs(self) -> Needs:
        return replace(super().needs, recorded_means=self.kl_in_reward or self.cfg != "off")


@dataclass(frozen=True)
class FlowDPPOConfig(ChainConfig):
    """Keys of Flow-DPPO."""

    kl_threshold: float = main_key(1e-5, "KL to the rollout's policy above which a step stops", above=0)

    @property
    def needs(self) -> Needs:
        return replace(super().needs, recorded_means=self.kl_in_reward or self.cfg != "off")


# --- Flow-GRPO (arXiv 2505.05470): independent trajectories; all stochastic steps of one share its advantage.
#
# Flow-GRPO-Fast, DanceGRPO, MixGRPO and DDPO differ in how they sample (`configs/algorithm/`) and are this class.


class FlowGRPO(PolicyGradient):
    """Clipped surrogate on the steps of independent trajectories."""

    names = "flow_grpo flow_grpo_fast dance_grpo mix_grpo ddpo"
    settings: FlowGRPOConfig

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.past: dict[int, list[float]] = {}  # prompt -> latest rewards, if `algorithm.history` is set

    def trained_steps(self, window: tuple[int, ...], step: int) -> tuple[int, ...]:
        count = max(1, round(self.settings.timestep_fraction * len(window)))
        return window if count == len(window) else sampled_steps(window, count, self.config.trainer.seed, step)

    def proximal(self, policy: Policy, tape: Tape, options: dict[str, Any]) -> dict[int, torch.Tensor] | None:
        if not self.needs.start_weights:
            return None
        found: dict[int, torch.Tensor] = {}
        began = policy.earlier[0]
        if policy.version > began.updates:  # else the current weights are those at the start of the step
            with began.swapped_in():
                engine.replay(policy.pipe, tape, lambda k, s: found.update({k: s.log_prob}), grad=False, **options)
        return found

    def kl_to_base(self, policy: Policy, batch: Batch) -> torch.Tensor:
        total = torch.zeros(len(batch.samples))

        def on_step(k: int, step: ReplayedStep) -> None:
            step = step.reached()
            assert step.recorded_mean is not None and step.recorded_log_prob is not None
            kl = self._kl(step, step.recorded_mean, step.recorded_log_prob)
            total.add_(kl.cpu() / len(batch.trained))

        with policy.base():
            engine.replay(policy.pipe, batch.tape, on_step, steps=batch.trained, grad=False)
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
            # too few rewards of this prompt: use those of the batch (DDPO)
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


# --- GRPO-Guard (arXiv 2510.22319): a ratio whose mean and variance are the same at every step.
#
# With log-probabilities averaged over dimensions the mean log-ratio is -KL / D < 0 and its spread differs from step to
# step by an order of magnitude, so the clip range rarely affects samples with positive advantages. Guard adds
# the missing KL and multiplies by the step's std: log ratio = mean(z (mu - mu_old)). Each step's loss is divided by
# |dt| (`timestep_weights: inverse_dt`; Precise uses `inverse_jacobian`, arXiv 2605.23522).


class GRPOGuard(FlowGRPO):
    """Flow-GRPO with the normalised ratio."""

    names = "grpo_guard"
    settings: GRPOGuardConfig  # type: ignore[assignment]

    def gain(self, rule: Rule) -> float:
        return rule.jacobian  # the ratio is multiplied by std

    def log_ratio(self, step: ReplayedStep) -> torch.Tensor:
        if self.settings.cfg == "off":  # see PolicyGradient.log_ratio
            old_log_prob, old_mean = step.log_prob.detach(), step.mean.detach()
        else:
            assert step.recorded_log_prob is not None and step.recorded_mean is not None
            old_log_prob, old_mean = step.recorded_log_prob, step.recorded_mean
        return guard_log_ratio(step.log_prob, old_log_prob, step.mean, old_mean, step.std)


# --- Flow-DPPO: a trust region by KL instead of ratio.
#
# Gaussian steps have a closed-form KL, ||mu - mu_old||^2 / (2 std^2). A sample whose KL to the rollout's policy exceeds
# `kl_threshold` gets no gradient that increases it; below the threshold nothing is clipped, so that an unlikely noise
# sample does not stop a step that has hardly moved.


class FlowDPPO(FlowGRPO):
    """Flow-GRPO with a KL mask instead of the clip."""

    names = "flow_dppo"
    settings: FlowDPPOConfig  # type: ignore[assignment]

    def policy_loss(
        self, step: ReplayedStep, advantages: torch.Tensor, proximal: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, dict[str, float]]:
        assert proximal is None, "it clips nothing"
        log_ratio = self.log_ratio(step)
        old_mean = step.mean.detach() if self.settings.cfg == "off" else step.recorded_mean
        assert old_mean is not None
        kl, threshold = gaussian_kl(step.mean.detach(), old_mean, step.std), self.settings.kl_threshold
        losses, metrics = masked_policy_loss(log_ratio, torch.zeros_like(log_ratio), advantages, kl, threshold)
        return losses, metrics | ratio_spread(log_ratio, kl >= threshold)
