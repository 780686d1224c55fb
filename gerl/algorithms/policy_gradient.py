"""Policy gradient over denoising trajectories: the family of Flow-GRPO.

A trajectory's stochastic steps are the actions of a Markov decision process (DDPO, arXiv 2305.13301; Flow-GRPO, arXiv
2505.05470); their log-probabilities under current and recorded weights give PPO's clipped surrogate. Flow-GRPO,
Flow-GRPO-Fast, DanceGRPO, MixGRPO and DDPO differ in how they sample (`configs/algorithm/`) and share this file.
"""

from typing import Any, ClassVar

import torch

from gerl.algorithms.base import Algorithm, Batch, Rewards
from gerl.algorithms.core_algos import clipped_policy_loss, kl_divergence, step_weights
from gerl.config import Config
from gerl.engine import ReplayedStep, Tape, replay
from gerl.engine.kernels import FlowRule, coefficients
from gerl.model.loading import Policy
from gerl.model.lora import lora_disabled
from gerl.protocol import UpdateStats


class PolicyGradient(Algorithm):
    """PPO's clipped surrogate on every trained step, and a KL to the base model."""

    clips: ClassVar[bool] = True  # the ratio has bounds

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.past: dict[int, list[float]] = {}  # prompt -> its latest rewards, where `algorithm.history` asks for them

    @property
    def needs_all_samples(self) -> bool:  # type: ignore[override]
        """A sample without advantage still has a distance to the base model."""
        return self.config.algorithm.kl_coef > 0 and not self.config.algorithm.kl_in_reward

    def log_ratio(self, step: ReplayedStep) -> torch.Tensor:
        """Log of the ratio to the rollout's policy, `[B]`; on policy 0."""
        # without guidance the recorded log-probability, that of the guided policy, is another policy's
        unguided = self.config.algorithm.cfg == "off"
        old = step.log_prob.detach() if unguided else step.recorded_log_prob
        assert old is not None
        return step.log_prob - old

    def policy_loss(self, step: ReplayedStep, advantages: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
        """Mean loss of the rows at one step, and the metrics of `clipped_policy_loss`."""
        log_ratio = self.log_ratio(step)
        clip = self.config.algorithm.clip_low, self.config.algorithm.clip_high
        return clipped_policy_loss(log_ratio, torch.zeros_like(log_ratio), advantages, *clip)

    def train(self, policy: Policy, batch: Batch, rows: list[int], num_pairs: int) -> UpdateStats:
        algorithm, tape = self.config.algorithm, batch.tape
        index = None if rows == list(range(tape.batch_size)) else rows
        options: dict[str, Any] = {"steps": batch.trained, "index": index, "cfg": algorithm.cfg}
        reference = self._reference(policy, tape, options) if self.needs_all_samples else {}
        weights = dict(zip(batch.trained, self._weights(tape, batch.trained), strict=True))
        credit = batch.credit[rows].to(tape.steps[0].x.device)
        stats = UpdateStats()

        def on_step(k: int, step: ReplayedStep) -> torch.Tensor:
            nonlocal stats
            loss, metrics = self.policy_loss(step, credit[:, k])
            kl = self._kl(step, reference[k]).mean() if reference else torch.zeros((), device=credit.device)
            total = weights[k] * loss + algorithm.kl_coef * kl
            stats += _sums(len(rows), float(total.detach()), float(kl.detach()), metrics)
            return total * (len(rows) / num_pairs)

        replay(policy.pipe, tape, on_step, **options)
        return stats

    def _reference(self, policy: Policy, tape: Tape, options: dict[str, Any]) -> dict[int, ReplayedStep]:
        """The same steps under the base model: the adapter is off once for the whole micro-batch."""
        kept: dict[int, ReplayedStep] = {}
        with lora_disabled(list(policy.denoisers.values())):
            replay(policy.pipe, tape, lambda k, step: kept.update({k: step}), grad=False, **options)
        return kept

    def _kl(self, step: ReplayedStep, reference: ReplayedStep) -> torch.Tensor:
        return kl_divergence(
            self.config.algorithm.kl_type,
            mean=step.mean,
            ref_mean=reference.mean,
            std=step.std,
            dt=step.rule.dt,
            output=step.model_output,
            ref_output=reference.model_output,
            log_prob=step.log_prob,
            ref_log_prob=reference.log_prob,
        )

    def _weights(self, tape: Tape, trained: tuple[int, ...]) -> list[float]:
        """Loss factors of the trained steps; those by std have mean 1 over all the steps that may be trained."""
        kind, (first, end) = self.config.algorithm.timestep_weights, self.config.sampling.steps_range
        if kind != "std":
            rules = [tape.steps[k].rule for k in trained]
            return step_weights(kind, [r.std for r in rules], [r.dt for r in rules], [r.jacobian for r in rules])
        weights = step_weights(kind, [_std(self.config, tape, k) for k in range(first, end)], [], [])
        return [weights[k - first] for k in trained]

    def kl_to_base(self, policy: Policy, batch: Batch) -> torch.Tensor:
        """KL of the rollout's policy to the base model, mean over the trained steps: `[R]`, from recorded values."""
        total = torch.zeros(len(batch.samples))

        def on_step(k: int, step: ReplayedStep) -> None:
            assert step.recorded_mean is not None and step.recorded_log_prob is not None
            kl = kl_divergence(
                self.config.algorithm.kl_type,
                mean=step.recorded_mean,
                ref_mean=step.mean,
                std=step.std,
                dt=step.rule.dt,
                log_prob=step.recorded_log_prob,
                ref_log_prob=step.log_prob,
            )
            total.add_(kl.cpu() / len(batch.trained))

        with lora_disabled(list(policy.denoisers.values())):
            replay(policy.pipe, batch.tape, on_step, steps=batch.trained, grad=False)
        return total

    def advantages(self, rewards: Rewards) -> torch.Tensor:
        size = self.config.algorithm.history
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
        return {"past": {str(prompt): values for prompt, values in self.past.items()}}

    def load_state(self, state: dict[str, Any]) -> None:
        self.past = {int(prompt): values for prompt, values in state.get("past", {}).items()}


def _std(config: Config, tape: Tape, k: int) -> float:
    """The std step `k` has, or would have if it were stochastic."""
    rule = tape.steps[k].rule
    if rule.std > 0 or not isinstance(rule, FlowRule):
        return rule.std
    sigma_one = tape.steps[0].rule.sigma_next
    return coefficients(config.sampling.kernel, rule.sigma, rule.sigma_next, config.sampling.noise_level, sigma_one)[1]


def _sums(samples: int, loss: float, kl: float, metrics: dict[str, float]) -> UpdateStats:
    return UpdateStats(
        pairs=samples,
        loss=loss * samples,
        kl=kl * samples,
        clip_low=metrics["clip_fraction_low"] * samples,
        clip_high=metrics["clip_fraction_high"] * samples,
        log_ratio=metrics["log_ratio_mean"] * samples,
        ratio_deviation=metrics["ratio_deviation"],
    )
