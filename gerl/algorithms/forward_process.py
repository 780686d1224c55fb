"""Forward-process algorithms: the likelihood-free family of DiffusionNFT, and regression to rewarded images."""

from __future__ import annotations  # torch is imported lazily

import functools
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from gerl.algorithms.base import (
    Algorithm,
    Batch,
    Measures,
    Pooled,
    Rewards,
    ShapedConfig,
    Sums,
    compares_within_groups,
    group_ids,
    group_sums,
    pooled_rows,
    pooled_sum,
    summed,
)
from gerl.algorithms.common import per_sample, replayed, requires, sampled_noise
from gerl.algorithms.core_algos import Metrics, best_of_group, regression_weights
from gerl.algorithms.lazily import Policy, ReplayedStep, Rule, StepGradients, engine, torch, transitions
from gerl.algorithms.planning import any_steps, sampled_steps
from gerl.config import Config
from gerl.config.algorithms import AlgorithmConfig, Needs, cfg_key
from gerl.config.blocks import CfgMode, TimestepSampling
from gerl.config.schema import key, main_key
from gerl.errors import ConfigError
from gerl.protocol import Sample, UpdateStats


@dataclass(frozen=True)
class ForwardProcessConfig(AlgorithmConfig):
    """Keys of algorithms that noise finished images again and compare outputs at some noise levels."""

    cfg: CfgMode = cfg_key("off")
    timesteps: int | None = main_key(None, "noise levels trained per trainer step; null: all in the range", low=1)
    timestep_sampling: TimestepSampling = key(
        "stratified",
        "how levels are chosen from the range. stratified: one from each of `timesteps` equal parts; step: at random, "
        "the same for all images of a step; sample: at random per image (per group, if it shares its noise), while the "
        "denoiser runs at all levels",
    )
    reference_guidance: float | None = key(
        None,
        "guidance scale of the base model as reference of the KL and of preferences, which may differ from the "
        "rollout's; null: that of the update",
        low=0,
    )
    old_decay: list[float] = key(
        [0.0, 0.0, 0.0, 0.0],
        "decay of the old policy, averaged once per trainer step: [hold, start, slope, limit] is start for `hold` "
        "steps, then rises by slope per step up to limit",
    )
    old_every: int = key(1, "trainer steps between updates of the old policy", low=1)
    rollout_decay: list[float] | None = key(None, "the same for the weights that sample; null: the trained weights")
    old_kl_coef: float = key(0.0, "weight of the squared distance to the old policy", low=0)
    norm_coef: float = key(0.0, "weight of the output norm's squared excess over the base model's (NormGuard)", low=0)

    @property
    def needs(self) -> Needs:
        old = self.old_decay if self.old_kl_coef > 0 else None
        return replace(super().needs, base_model=self.norm_coef > 0, old_decay=old, rollout_decay=self.rollout_decay)

    def check(self) -> None:
        super().check()
        for name, value in (("old_decay", self.old_decay), ("rollout_decay", self.rollout_decay)):
            if value is not None and (len(value) != 4 or not (0 <= value[1] <= 1 and 0 <= value[3] <= 1)):
                raise ConfigError(f"algorithm.{name}={list(value)}: give [hold, start, slope, limit], decays in [0, 1]")


@dataclass(frozen=True)
class ContrastConfig(ForwardProcessConfig, ShapedConfig):
    """Keys of algorithms with implicit policies around the old one."""

    mix: float = key(1.0, "b: distance of the implicit policies from the old one", above=0)

    @property
    def needs(self) -> Needs:
        return replace(super().needs, old_decay=self.old_decay)


@requires(loss_over="group")
@dataclass(frozen=True)
class PreferenceConfig(ForwardProcessConfig):
    """Keys of preferences within a group, whose images share their noise."""

    beta: float = key(100.0, "sharpness of preferences", above=0)


@dataclass(frozen=True)
class RWRConfig(ForwardProcessConfig):
    """Keys of reward-weighted regression."""

    beta: float = key(1.0, "sharpness of the softmax over the rewards of a group", above=0)


@requires(files=True, single_images=True)
@dataclass(frozen=True)
class SFTConfig(ForwardProcessConfig):
    """Keys of supervised fine-tuning."""


# --- Forward-process algorithms: the likelihood-free family of DiffusionNFT.
#
# No trajectory is scored. The clean latents of a rollout (with any ODE solver) are noised again, x_s = (1 - s) x0 +
# s eps, at some of the schedule's noise levels, and the model's output there is pulled towards or pushed away from the
# rollout, depending on the reward. An algorithm is its loss at one noise level; the old policy is an average of the
# trained weights, the reference is the base model.


@dataclass(frozen=True)
class Noised:
    """One noise level of a micro-batch of B rows; only `output` has a graph."""

    rule: Rule
    x0: torch.Tensor  # [B, ...] fp32 clean latents of the rollout
    noise: torch.Tensor  # [B, ...] fp32
    x: torch.Tensor  # [B, ...] fp32 rule.noised(x0, noise)
    output: torch.Tensor  # [B, ...] fp32 model output, with graph
    old: torch.Tensor | None  # [B, ...] fp32 output of the old policy
    reference: torch.Tensor | None  # [B, ...] fp32 output of the base model
    advantages: torch.Tensor  # [B] credit
    groups: torch.Tensor  # [B] int64, equal for rows of one group
    gate: torch.Tensor | None = None  # [B] factors of the KL to the base model; None: 1
    pooled: Sums | None = None  # sums of `pooled` over whole groups; None if groups are complete
    scale: torch.Tensor | None = None  # [B] factors of rows in `transitions.unwritten`; None: 1

    @property
    def target(self) -> torch.Tensor:
        """Output that leads back to `x0`, [B, ...]."""
        return self.rule.target(self.x0, self.noise)

    def _mapped(self, change: Callable[[torch.Tensor], torch.Tensor], *names: str) -> Noised:
        tensors = {name: getattr(self, name) for name in ("x0", "noise", "x", "output", "old", "reference", *names)}
        changed: dict[str, Any] = {name: change(value) for name, value in tensors.items() if value is not None}
        return replace(self, **changed)

    def without(self, written: torch.Tensor) -> Noised:
        """Return the rows as [B, N] without the elements `written`, which the pipeline sets itself (a first frame).

        Raises `ReplayError` if nothing of a row is left.
        """
        counts = transitions.numbers_left(written)
        masked = self._mapped(functools.partial(transitions.unwritten, written=written))
        return replace(masked, scale=(counts.max() / counts).sqrt())

    def rows(self, index: list[int]) -> Noised:
        """Return the rows `index`."""
        return self._mapped(lambda values: values[index], "advantages", "groups", "gate", "scale")


# called for each noise level k with the rows that have credit there, and their samples; returns a loss or None
OnLevel = Callable[[int, Noised, list[Sample]], "torch.Tensor | None"]


def pooled_mean(s: Noised) -> torch.Tensor | None:
    """Return for each row the mean of `pooled` over its whole group; None if groups are complete."""
    if s.pooled is None:
        return None
    sums, counts = s.pooled
    return sums / counts.view(-1, *[1] * (sums.ndim - 1))


def group_mean(values: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Return for each row the mean of the `values` [B] of its group, [B], with gradient."""
    same = groups[:, None] == groups
    return torch.where(same, values, 0.0).sum(1) / same.sum(1)


class ForwardProcess(Algorithm):
    """Base class: noise levels, noise, and the outputs of old policy and base model at the same inputs."""

    preset = "diffusion_nft"
    settings: ForwardProcessConfig
    guided_reference: ClassVar[bool] = False  # the base model has the rollout's guidance, also with cfg=off
    shared_noise: bool = False  # the samples of a group share the noise of each level
    compared_with_old: tuple[str, ...] = ()  # metrics of `loss` that are 0 at the old policy

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.needs_old, self.needs_reference = self.needs.old_decay is not None, self.needs.base_model
        _, start, slope, limit = self.settings.old_decay
        follows = start == 0 and slope * limit == 0  # the old policy equals the trained one after every trainer step
        self.old_differs = not follows or self.settings.old_every > 1 or config.actor.updates > 1

    def renews_old(self, step: int) -> bool:
        return step % self.settings.old_every == 0

    @abstractmethod
    def loss(self, s: Noised) -> tuple[torch.Tensor, Metrics]:
        """Return the losses [B] of the rows at one noise level, and metrics (means over the rows)."""

    def pooled(self, s: Noised) -> torch.Tensor:
        """Return what each row contributes to the group sums in the losses of its group, [B] or [B, n]."""
        raise self.undefined("pooled")

    def sums(self, pooled: Pooled, samples: list[Sample], level: int, like: torch.Tensor) -> Sums:
        """Sum `pooled` of the rows at noise level `level`: here by group."""
        return group_sums(pooled, samples, level, like)

    def kl_weights(self, s: Noised) -> torch.Tensor | float:
        """Return factors [B] of the KL to the base model, besides `kl_coef`."""
        del s
        return 1.0

    def trained_steps(self, window: tuple[int, ...], step: int) -> tuple[int, ...]:
        levels, seed = range(*self.config.sampling.steps_range), self.config.trainer.seed
        count = min(self.settings.timesteps or len(levels), len(levels))
        choose = {"stratified": sampled_steps, "step": any_steps}.get(self.settings.timestep_sampling)
        return choose(levels, count, seed, step) if choose else tuple(levels)  # then `credit` leaves out levels

    def credit(self, rewards: Rewards) -> torch.Tensor:
        values = super().credit(rewards)
        levels, count = range(*self.config.sampling.steps_range), self.settings.timesteps
        if self.settings.timestep_sampling != "sample" or count is None or count >= len(levels):
            return values
        trained = torch.zeros(values.shape, dtype=torch.bool)
        for row, sample in enumerate(rewards.samples):
            trained[row, list(any_steps(levels, count, *self._noise_seed(sample)))] = True
        return torch.where(trained, values, torch.nan)

    @property
    def credits_groups_alone(self) -> bool:
        return self._inherits(ForwardProcess.credit, Algorithm.advantages) and compares_within_groups(self.settings)

    def kept_rows(self, batch: Batch) -> list[int]:
        credit = batch.credit[:, list(batch.trained)]
        has_credit = ~credit.isnan().all(1) if self.needs_all_samples else (credit.nan_to_num() != 0).any(1)
        return [int(r) for r in has_credit.nonzero()]

    def pool(self, policy: Policy, batch: Batch, rows: list[int]) -> Pooled:
        parts: list[Pooled] = []

        def on_level(k: int, s: Noised, of: list[Sample]) -> None:
            parts.append(pooled_rows(self.pooled(s), of, k))

        self._visit(policy, batch, rows, on_level, self.needs_reference, None, grad=False)
        return pooled_sum(parts)

    def train(
        self, policy: Policy, batch: Batch, rows: list[int], num_pairs: float, meter: StepGradients[Any] | None = None
    ) -> UpdateStats:
        settings, measures = self.settings, list[Measures]()
        base = self.needs_reference or self.kl_coef > 0

        def on_level(k: int, s: Noised, samples: list[Sample]) -> torch.Tensor:
            if batch.pooled is not None:
                s = replace(s, pooled=self.sums(batch.pooled, samples, k, s.advantages))
            loss, metrics = self.loss(s)
            to_base = _distance(s.output, s.reference, self.kl_coef)
            pull = self.kl_coef * self.kl_weights(s) * (to_base if s.gate is None else s.gate * to_base)
            total = loss + pull + settings.old_kl_coef * _distance(s.output, s.old, 1.0)
            sums: Metrics = {}
            if s.reference is not None and settings.norm_coef > 0:
                total = total + settings.norm_coef * norm_excess(s.output, s.reference) ** 2
                sums["norm_excess"] = (norm_excess(s.output, s.reference) / rms(s.reference)).detach().sum()
            sums["loss"] = total.detach().sum()
            if s.reference is not None and self.kl_coef > 0:
                sums["kl"] = to_base.detach().sum()
            left_out = () if self.old_differs else self.compared_with_old
            measures.append(
                Measures(len(samples), sums, {name: v for name, v in metrics.items() if name not in left_out})
            )
            return total.sum() / num_pairs

        self._visit(policy, batch, rows, on_level, base, meter, grad=True)
        return summed(measures)

    def _visit(
        self,
        policy: Policy,
        batch: Batch,
        rows: list[int],
        on_level: OnLevel,
        base: bool,
        meter: StepGradients[Any] | None,
        grad: bool,
    ) -> None:
        """Replay the trained noise levels of `rows`, with those of the `base` model, and pass on rows with a credit."""
        tape = batch.tape
        x0 = tape.steps[-1].x_next[rows]
        samples, trained = [batch.samples[r] for r in rows], ~batch.credit[rows].isnan()
        credit = batch.credit[rows].to(x0.device)
        noise = {k: self._noise(samples, k, x0) for k in batch.trained}
        latents = {k: tape.steps[k].rule.noised(x0, noise[k]) for k in batch.trained}
        index = None if rows == list(range(tape.batch_size)) else rows
        options: dict[str, Any] = {"steps": batch.trained, "index": index, "latents": latents}
        options["step_batch"] = self.step_batch(meter)
        old, reference = self._others(policy, batch, rows, options, base)
        groups = group_ids(samples).to(x0.device)
        gate = None if batch.gate is None else batch.gate[rows].to(x0)

        def on_step(k: int, step: ReplayedStep) -> torch.Tensor | None:
            output = step.model_output
            previous = output.detach() if self.needs_old and policy.old_is_current else old.get(k)
            s = Noised(
                step.rule, x0, noise[k], latents[k], output, previous, reference.get(k), credit[:, k], groups, gate
            )
            places = [i for i, here in enumerate(trained[:, k].tolist()) if here]
            if not places:  # ranks in lockstep backpropagate equally often
                return 0 * output.sum() if grad and self.config.lockstep else None
            if step.written is not None:
                s = s.without(step.written)
            return on_level(k, s if len(places) == len(rows) else s.rows(places), [samples[i] for i in places])

        engine.replay(policy.pipe, tape, on_step, cfg=self.settings.cfg, grad=grad, meter=meter, **options)

    def _others(
        self, policy: Policy, batch: Batch, rows: list[int], options: dict[str, Any], with_reference: bool
    ) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
        """Return the outputs by noise level of the old policy and of the base model, if needed and unknown."""
        old: dict[int, torch.Tensor] = {}
        reference: dict[int, torch.Tensor] = {}
        cfg, tape, guidance = self.settings.cfg, batch.tape, self.settings.reference_guidance
        if policy.old is not None and self.needs_old and not policy.old_is_current:
            with policy.old.swapped_in():
                old = replayed(policy.pipe, tape, lambda step: step.model_output, cfg=cfg, **options)
        if with_reference:
            cfg = "joint" if self.guided_reference or guidance is not None else cfg
            with policy.base():
                if guidance is not None:  # another call of the pipeline at the same latents
                    tape = engine.record_structure(policy.pipe, tape, rows, {"guidance_scale": guidance})
                    options = options | {"index": None}
                reference = replayed(policy.pipe, tape, lambda step: step.model_output, cfg=cfg, **options)
        return old, reference

    def _noise_seed(self, sample: Sample) -> tuple[int | str, ...]:
        return (self.config.trainer.seed, sample.step, repr(sample.group)) if self.shared_noise else (sample.seed,)

    def _noise(self, samples: list[Sample], k: int, x0: torch.Tensor) -> torch.Tensor:
        return sampled_noise(x0, [("forward", *self._noise_seed(s), k) for s in samples])


def rms(values: torch.Tensor) -> torch.Tensor:
    """Return the root mean square over all non-batch dimensions, [B, ...] -> [B]; its gradient at 0 is 0."""
    flat = values.flatten(1)
    return torch.linalg.vector_norm(flat, dim=1) / flat.shape[1] ** 0.5


def norm_excess(output: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return the excess of the root mean square over the reference's [B], for NormGuard (arXiv 2606.27771)."""
    return (rms(output) - rms(reference.detach())).relu()


def _distance(output: torch.Tensor, other: torch.Tensor | None, coefficient: float) -> torch.Tensor:
    """Return the mean squared distance of two outputs [B], 0 without a weight."""
    if other is None or coefficient == 0:
        return torch.zeros(len(output), device=output.device)
    return per_sample((output - other.detach()) ** 2)


# --- Regression to rewarded images: flow matching on the rollout, weighted by a function of the reward.
#
#     L = weight * mean((v - target)^2)
#
# Reward-weighted regression (Peters & Schaal 2007; of diffusion models arXiv 2302.12192) weighs the images of a group
# by a softmax of their rewards, the exponentiated advantages of a KL-regularised optimum; best-of-n (RAFT, arXiv
# 2304.06767) keeps the best of each group. Weights are never negative: nothing diverges, but images that are merely
# less bad are imitated too.


class _Regression(ForwardProcess):
    def loss(self, s: Noised) -> tuple[torch.Tensor, Metrics]:
        """Return the loss above; reports the mean `squared_error` without weights."""
        errors = (s.output - s.target) ** 2
        return s.advantages * per_sample(errors), {"squared_error": errors.detach().mean()}


class RewardWeightedRegression(_Regression):
    """Credit `group size * softmax(beta * advantage)`: mean 1 in a group, 0 if all rewards are equal."""

    names = "rwr"
    settings: RWRConfig

    def advantages(self, rewards: Rewards) -> torch.Tensor:
        return regression_weights(rewards.totals, rewards.group_ids, temperature=1 / self.settings.beta)


class BestOfN(_Regression):
    """Credit 1 for the best of each group, unless all are equal; the others are not trained on."""

    names = "best_of_n"

    def advantages(self, rewards: Rewards) -> torch.Tensor:
        return best_of_group(rewards.totals, rewards.group_ids)


def regularising(config: Config) -> Config:
    """Return the configuration for imitating the images of `data.regularise` beside another algorithm."""
    data = replace(config.data, train_on="files", regularise=None)
    return replace(config, algorithm=SFTConfig("sft"), data=data)


class SFT(_Regression):
    """Supervised fine-tuning: credit 1 for the good images of a file; others are not trained on.

    Good is the best image of a row with several, and a single image unless it is disliked.
    """

    names = "sft"
    settings: SFTConfig

    def advantages(self, rewards: Rewards) -> torch.Tensor:
        ids, totals = rewards.group_ids, rewards.totals
        alone = ids.bincount()[ids] == 1
        good = torch.where(alone, totals > 0, best_of_group(totals, ids) > 0)
        return torch.where(good, 1.0, torch.nan)
