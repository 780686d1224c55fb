"""Policy gradients over denoising trajectories: Flow-GRPO, and its variants GRPO-Guard and Flow-DPPO.

A trajectory's stochastic steps are the actions of a Markov decision process (DDPO, arXiv 2305.13301; Flow-GRPO, arXiv
2505.05470); their log-probabilities under current and recorded weights give PPO's clipped surrogate.
"""

from __future__ import annotations  # torch is imported lazily

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from pydantic import TypeAdapter, ValidationError

from gerl.algorithms.base import (
    Algorithm,
    Batch,
    ClippedConfig,
    DownSampledConfig,
    Measures,
    Rewards,
    compares_within_groups,
    summed,
)
from gerl.algorithms.core_algos import (
    RELATIVE_WEIGHTS,
    Metrics,
    batch_advantages,
    clipped_policy_loss,
    gaussian_kl,
    generalised_advantages,
    group_advantages,
    guard_log_ratio,
    kl_divergence,
    masked_policy_loss,
    ratio_spread,
    step_weights,
)
from gerl.algorithms.lazily import Policy, ReplayedStep, Rule, StepGradients, Tape, engine, torch, transitions
from gerl.algorithms.planning import sampled_steps
from gerl.config import Config
from gerl.config.algorithms import AlgorithmConfig, Needs
from gerl.config.blocks import KLKind, SamplingConfig, StepLikelihood, StepWeighting
from gerl.config.schema import key, main_key
from gerl.errors import CheckpointError, ConfigError
from gerl.protocol import StepFacts, UpdateStats


@dataclass(frozen=True)
class TrajectoryClipConfig(ClippedConfig):
    """Clip range for log-probabilities that are means over the D dimensions of the latents.

    Their difference is a mean of D independent terms and spreads as 1 / sqrt(D), so the range depends on the image
    size.
    """

    clip_dimensions: int | None = key(
        65536,
        "latent dimensions for which clip_low and clip_high are meant (SD3 at 512 x 512: 65536): with D dimensions "
        "they are scaled by sqrt(this / D); null: unscaled",
        low=1,
    )

    def clip_range(self, dimensions: int) -> tuple[float, float]:
        scale = 1.0 if self.clip_dimensions is None else math.sqrt(self.clip_dimensions / dimensions)
        return scale * self.clip_low, scale * self.clip_high


@dataclass(frozen=True)
class PolicyGradientConfig(AlgorithmConfig):
    """Keys of policy gradients on the stochastic steps of trajectories."""

    kl_type: KLKind = key("gaussian", "the true KL of a step; |dt| times it; squared velocity; or sampled estimators")

    @property
    def needs(self) -> Needs:
        return replace(super().needs, trajectory=True, ratio=True, noise=True)

    @property
    def step_weighting(self) -> StepWeighting:
        """Name of the weighting of the steps' losses."""
        return "uniform"

    @property
    def step_discount(self) -> float:
        """Factor per step between a trained step and the reward, if they are weighted by it."""
        return 1.0

    @property
    def step_likelihood(self) -> StepLikelihood:
        """Name of the log-likelihood in the ratio."""
        return "gaussian"

    def check(self) -> None:
        super().check()
        if self.kl_type == "k1" and not self.subtracts_kl:
            raise ConfigError(
                "algorithm.kl_type=k1: on policy its gradient is 0 on average, so in the loss it has no effect; "
                f"use gaussian or k2{'' if self.needs.tree else ', or algorithm.kl_in_reward=true'}"
            )

    def check_sampling(self, sampling: SamplingConfig) -> None:
        if sampling.noise_level == 0 or sampling.kernel == "ode":
            name = "kernel=ode" if sampling.kernel == "ode" else "noise_level=0"
            raise ConfigError(
                f"sampling.{name}: {self.name} is a policy gradient and needs stochastic steps: "
                "a deterministic one has no log-probability; use kernel=flow_sde with noise_level=0.7, or "
                "algorithm=diffusion_nft"
            )


@dataclass(frozen=True)
class WeightedConfig(PolicyGradientConfig):
    """Keys for weighting the timesteps."""

    timestep_weights: StepWeighting = key(
        "uniform",
        "factor of each step's loss, whose gradient is J / std times the noise: 1, std, 1/|dt|, 1/|J|, std |dt| / "
        "|J| (PCPO), std^2 / |J|, or gamma to the power of the steps that follow; python -m gerl.preflight signal=4 "
        "measures which carries the reward",
    )
    gamma: float = key(
        1.0,
        "timestep_weights=discount: discount of the reward per step that follows a trained one; adv_estimator=gae: per "
        "noisy step",
        above=0,
        high=1,
    )

    @property
    def step_weighting(self) -> StepWeighting:
        return self.timestep_weights

    @property
    def step_discount(self) -> float:
        return self.gamma


# an additional loss and its metrics, as a function of each trained step
ExtraLoss = Callable[[int, "ReplayedStep"], "tuple[torch.Tensor, Metrics]"]


class PolicyGradient(Algorithm):
    """PPO's clipped surrogate on every trained step, and a KL to the base model."""

    settings: PolicyGradientConfig

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.kl_on_all = not self.settings.subtracts_kl  # otherwise the KL is in the reward

    @property
    def adds_kl(self) -> bool:
        """Whether the KL to the base model is in the loss."""
        return self.kl_on_all and self.kl_coef > 0

    def log_ratio(self, step: ReplayedStep) -> torch.Tensor:
        # without guidance the recorded log-probability belongs to another (the guided) policy
        unguided = self.settings.cfg == "off"
        old = step.log_prob.detach() if unguided else step.recorded_log_prob
        assert old is not None
        return self._as_configured(step, step.log_prob - old)

    def _as_configured(self, step: ReplayedStep, difference: torch.Tensor) -> torch.Tensor:
        """Convert a difference of Gaussian log-likelihoods to the configured likelihood."""
        # -(x' - mean)^2 is 2 std^2 times the Gaussian's log-likelihood, up to a constant
        return 2 * step.std**2 * difference if self.settings.step_likelihood == "squared_error" else difference

    def proximal(self, policy: Policy, tape: Tape, options: dict[str, Any]) -> dict[int, torch.Tensor] | None:
        """Return log-probabilities [B] by step under the weights that the ratio is clipped to.

        For missing steps, the current ones. None: the ratio is clipped to the rollout's policy.
        """
        del policy, tape, options
        return None

    def further(self, policy: Policy, batch: Batch, rows: list[int], options: dict[str, Any]) -> ExtraLoss | None:
        """Return an additional loss with metrics, as a function of each trained step; None: no such loss.

        `options`: arguments of the replay.
        """
        del policy, batch, rows, options
        return None

    def gain(self, rule: Rule) -> float:
        """Return the factor of the sampled noise in the gradient of `log_ratio` with respect to the model output."""
        gaussian = rule.jacobian / rule.std
        return 2 * rule.std**2 * gaussian if self.settings.step_likelihood == "squared_error" else gaussian

    def step_facts(self, tape: Tape, trained: tuple[int, ...]) -> list[StepFacts]:
        weighted = zip(trained, self._weights(tape, trained), strict=True)
        rules = [(k, weight, _stochastic(self.config, tape, k)) for k, weight in weighted]
        return [StepFacts(k, r.sigma, r.dt, r.std, r.jacobian, w, w * self.gain(r)) for k, w, r in rules]

    def policy_loss(
        self, step: ReplayedStep, advantages: torch.Tensor, proximal: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Metrics]:
        """Return the losses [B] of a step, with the metrics of `clipped_policy_loss` and `ratio_spread`.

        `proximal`: log-probabilities [B] of the policy to clip to, if not the rollout's; the loss is then weighted by
        its ratio to the rollout's policy (decoupled PPO: AReaL, arXiv 2505.24298, equation 5).
        """
        log_ratio, bounds = self.log_ratio(step), self.settings.clip_range(step.x[0].numel())
        assert bounds is not None
        moved = log_ratio if proximal is None else self._as_configured(step, step.log_prob - proximal)
        losses, metrics = clipped_policy_loss(moved, torch.zeros_like(moved), advantages, *bounds)
        if proximal is not None:
            losses = losses * (log_ratio - moved).detach().exp()
        off = moved.detach().expm1()
        return losses, metrics | ratio_spread(log_ratio, (off > bounds[1]) | (off < -bounds[0]))

    def train(
        self, policy: Policy, batch: Batch, rows: list[int], num_pairs: float, meter: StepGradients[Any] | None = None
    ) -> UpdateStats:
        settings, tape = self.settings, batch.tape
        options = self.replay_options(batch, rows, meter)
        reference = self.base_steps(policy, tape, options) if self.adds_kl else {}
        proximal = self.proximal(policy, tape, options)
        further = self.further(policy, batch, rows, options)
        weights = dict(zip(batch.trained, self._weights(tape, batch.trained), strict=True))
        credit = batch.credit[rows].to(tape.steps[0].x.device)
        compared = settings.cfg != "off"  # else the ratio is to the same forward pass, 1 by construction
        measures: list[Measures] = []

        def on_step(k: int, step: ReplayedStep) -> torch.Tensor:
            clipped_to = None if proximal is None else proximal.get(k, step.log_prob.detach())
            reached = step if step.overwritten is None else step.reached()
            losses, metrics = self.policy_loss(reached, credit[:, k], clipped_to)
            deviation = metrics.pop("ratio_deviation")
            total, measured = weights[k] * losses.mean(), metrics if compared else {}
            if reference:
                kl = self.distance(reference[k], step)
                total = total + self.kl_coef * self.weighted_kl(kl, batch, rows).mean()
                measured = measured | {"kl": kl.detach().mean()}
            if further is not None:
                value, named = further(k, step)
                total, measured = total + value, measured | named
            means = {"loss": total.detach()} | measured
            measures.append(Measures(len(rows), means=means, deviation=deviation if compared else None))
            return total * (len(rows) / num_pairs)

        engine.replay(policy.pipe, tape, on_step, **options)
        return summed(measures)

    def distance(self, base: ReplayedStep, step: ReplayedStep) -> torch.Tensor:
        """Return the KL [B] of a step to that of the base model, over the latents that reach the images."""
        reached = step.reached()
        return self._kl(base.reached(), reached.mean, reached.log_prob, reached.model_output)

    def _kl(
        self, base: ReplayedStep, mean: torch.Tensor, log_prob: torch.Tensor, output: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the KL [B] of a policy's step to that of the base model."""
        return kl_divergence(
            self.settings.kl_type, std=base.std, dt=base.rule.dt, mean=mean, ref_mean=base.mean, output=output,
            ref_output=base.model_output, log_prob=log_prob, ref_log_prob=base.log_prob,
        )  # fmt: skip

    def _weights(self, tape: Tape, trained: tuple[int, ...]) -> list[float]:
        """Return loss weights of the trained steps; relative weights average 1 over all trainable steps."""
        kind, steps = self.settings.step_weighting, trained
        if kind == "discount":  # gamma to the power of the steps that follow, without those that compression skips
            return [self.settings.step_discount ** sum(s.rule.dt != 0 for s in tape.steps[k + 1 :]) for k in trained]
        if kind in RELATIVE_WEIGHTS:
            # steps skipped by the compression after the window have no weight
            steps = tuple([k for k in range(*self.config.sampling.steps_range) if tape.steps[k].rule.dt])
        rules = [_stochastic(self.config, tape, k) for k in steps]
        weights = step_weights(kind, *zip(*[(r.std, r.dt, r.jacobian) for r in rules], strict=True))
        return [weights[steps.index(k)] for k in trained]


def _stochastic(config: Config, tape: Tape, k: int) -> Rule:
    """Return the transition rule of step `k`, as if it were stochastic."""
    rule, sampling = tape.steps[k].rule, config.sampling
    if rule.std > 0:
        return rule
    return transitions.with_noise(rule, sampling.kernel, sampling.noise_level, tape.steps[0].rule.sigma_next)


@dataclass(frozen=True)
class ChainConfig(WeightedConfig, DownSampledConfig):
    """Keys of algorithms with independent trajectories."""

    kl_in_reward: bool = key(False, "subtract the KL from the reward rather than add it to the loss")
    timestep_fraction: float = key(
        1.0, "share of the stochastic steps that are trained, selected at random each step", above=0, high=1
    )
    history: int = key(0, "rewards kept per prompt whose mean and std normalise; 0: those of the group", low=0)
    lam: float = key(
        0.95,
        "adv_estimator=gae: weight of later steps' errors of the critic; 1: the reward itself, minus the value; 0: the "
        "value of the next step only",
        low=0,
        high=1,
    )

    @property
    def needs(self) -> Needs:
        needs, values = super().needs, self.adv_estimator == "gae"
        alone = needs.single_images or self.history > 0
        return replace(needs, single_images=alone, recorded_means=self.kl_in_reward, values=values)

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

    names = "flow_grpo flow_grpo_fast dance_grpo mix_grpo ddpo flow_ppo"
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
        log_probs: dict[int, torch.Tensor] = {}
        began = policy.earlier[0]
        if policy.version > began.updates:  # else the current weights are those at the start of the step
            with began.swapped_in():
                engine.replay(policy.pipe, tape, lambda k, s: log_probs.update({k: s.log_prob}), grad=False, **options)
        return log_probs

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

    @property
    def credits_groups_alone(self) -> bool:
        is_inherited = self._inherits(Algorithm.credit, FlowGRPO.advantages) and not self.settings.history
        return is_inherited and compares_within_groups(self.settings)

    def advantages(self, rewards: Rewards) -> torch.Tensor:
        if self.needs.values:
            return self.advantages_by_values(rewards)
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
            reference = torch.tensor(past, dtype=torch.float64) if len(past) == size else batch
            result.append((total - reference.mean()) / (reference.std(correction=0) + 1e-4))
        return torch.stack(result).to(rewards.totals.dtype)

    def advantages_by_values(self, rewards: Rewards) -> torch.Tensor:
        """Return the advantages [B, T] by a critic's values, NaN at steps without one; [B] if there are none yet."""
        settings, ids = self.settings, rewards.group_ids
        returns = self.returns(rewards)
        if rewards.values is None:
            return batch_advantages(returns)
        advantages = generalised_advantages(returns, rewards.values, settings.gamma, settings.lam)
        valued = ~advantages.isnan()
        if settings.advantage_std == "group":
            advantages[valued] = group_advantages(advantages[valued], ids[:, None].expand_as(advantages)[valued])
        elif settings.advantage_std == "batch":
            advantages[valued] = batch_advantages(advantages[valued])
        return advantages

    def returns(self, rewards: Rewards) -> torch.Tensor:
        """Return what a critic predicts, [B]: the rewards, minus the mean of the group with `critic.residual`."""
        if not self.config.critic.residual:
            return rewards.totals
        return group_advantages(rewards.totals, rewards.group_ids, "none")

    def state(self) -> dict[str, Any]:
        return super().state() | {"past": dict(zip(map(str, self.past), self.past.values(), strict=True))}

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
    ) -> tuple[torch.Tensor, Metrics]:
        assert proximal is None, "it clips nothing"
        log_ratio = self.log_ratio(step)
        old_mean = step.mean.detach() if self.settings.cfg == "off" else step.recorded_mean
        assert old_mean is not None
        kl, threshold = gaussian_kl(step.mean.detach(), old_mean, step.std), self.settings.kl_threshold
        losses, metrics = masked_policy_loss(log_ratio, torch.zeros_like(log_ratio), advantages, kl, threshold)
        return losses, metrics | ratio_spread(log_ratio, kl >= threshold)
