"""Reward gradients: backpropagation from the reward of decoded images to the weights, exact or by surrogates."""

from __future__ import annotations  # torch is imported lazily

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from gerl.algorithms.base import Algorithm, Batch, Measures, Rewards, summed
from gerl.algorithms.common import per_sample, replayed, requires
from gerl.algorithms.lazily import FlowRule, Policy, ReplayedStep, StepGradients, Tape, engine, torch, transitions
from gerl.config import Config
from gerl.config.algorithms import AlgorithmConfig
from gerl.config.blocks import SamplingConfig
from gerl.config.exclusions import Exclusion
from gerl.config.schema import key
from gerl.errors import ConfigError, ReplayError
from gerl.protocol import Prompt, Sample, UpdateStats
from gerl.utils.seeding import derive_seed


@requires(trajectory=True, reward_gradient=True, finished_latents=True, single_images=True)
@dataclass(frozen=True)
class RewardGradientConfig(AlgorithmConfig):
    """Keys of backpropagation from the reward through decoder and denoiser."""

    excludes = (
        Exclusion("algorithm.margin!=null", "algorithm.target!=null", "the loss is measured from algorithm.margin or "
                  "algorithm.target", "remove one of them"),
        Exclusion("algorithm.cfg=off", "needs.reward_gradient", "the scored images were sampled with guidance, through "
                  "which the reward's gradient passes", "use cfg=joint or cfg=detach_uncond"),
        Exclusion("algorithm.dynamic_sampling>0", "needs.reward_gradient", "there is a gradient even if all rewards of "
                  "a group are equal", "remove it"),
        *(
            Exclusion(f"sampling.{key}!={value}", "needs.reward_gradient", "{algorithm.name} differentiates every step "
                      "as it was taken", f"use sampling.{key}={value}")
            for key, value in (("solver", "euler"), ("compression", "1"), ("cache", "none"))
        ),
    )  # fmt: skip

    margin: float | None = key(None, "the loss is the reward's shortfall below this; null: the negative reward")
    target: float | None = key(None, "the loss is the distance of the reward from this; null: see margin")
    loss_scale: float = key(1.0, "factor of the loss", above=0)
    decode_batch: int = key(1, "images decoded and scored with gradient at once: memory of decoder and scorers", low=1)

    def check_sampling(self, sampling: SamplingConfig) -> None:
        super().check_sampling(sampling)
        if sampling.num_inference_steps < self.needs.min_steps:
            raise ConfigError(
                f"sampling.num_inference_steps={sampling.num_inference_steps}: {self.name} needs at least "
                f"{self.needs.min_steps}"
            )


# --- Reward gradients: backpropagation from the reward to the weights.
#
# A loss of the rewards has a gradient at some latents: the finished ones, or those that one step predicts. From there
# it goes back by jumps. A jump is the replay of one denoising step whose output leads to latents with a known gradient;
# it adds to the gradient of the weights, and may pass the gradient of its own latents to the jump before. Algorithms
# differ in the evaluated latents and in the jumps.

LeadsTo = Callable[["ReplayedStep"], "torch.Tensor"]
Score = Callable[["torch.Tensor", Sequence[Prompt]], "torch.Tensor"]  # images, their prompts -> rewards [B], with graph
LatentScore = Callable[["Tape", "torch.Tensor", Sequence[Prompt]], "torch.Tensor"]  # of their call, clean latents


@dataclass(frozen=True)
class LatentJump:
    """A step through whose denoiser call the gradient is propagated.

    `leads_to`: latents that follow from it, with a known gradient. `before`: transformation of the gradient by the
    steps in between. `nested`: share of the gradient of its own latents that passes through the denoiser; 0: they are
    not differentiated, and the gradient is unchanged. `latents`: other latents than those of the trajectory, as data.
    """

    step: int
    leads_to: LeadsTo
    before: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = ()
    nested: float = 0.0
    latents: torch.Tensor | None = None


@dataclass(frozen=True)
class RewardEvaluation:
    """A part of the loss: the evaluated latents and the path of the gradient.

    `at`: jump whose latents are decoded; None: the finished ones. `weights` [B]: of images. `score`: else the config's.
    """

    hops: tuple[LatentJump, ...]
    at: LatentJump | None = None
    weights: float | torch.Tensor = 1.0
    score: Score | None = None


@dataclass
class MicroBatch:
    """Rows of a batch trained together: tape, prompts, and quantities of the update."""

    tape: Tape
    prompts: list[Prompt]
    images: float  # of the update
    measured: int | None = None  # the step whose gradient is being measured
    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # metrics, over the images


class RewardGradient(Algorithm):
    """Base class: rewards, their loss, and backpropagation."""

    preset = "draft"
    settings: RewardGradientConfig
    all_samples = True
    reward: Score  # set by workers that decode images
    latent_reward: LatentScore | None = None  # of clean latents, added to `reward`
    decodes: bool = True  # whether a scorer needs images

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.decode: Callable[..., torch.Tensor] = engine.decoded

    @abstractmethod
    def differentiated_steps(self, step: int) -> tuple[int, ...]:
        """Return the denoising steps, in order, through which trainer step `step` backpropagates."""

    @abstractmethod
    def evaluations(self, tape: Tape, trained: tuple[int, ...], samples: Sequence[Sample]) -> list[RewardEvaluation]:
        """Return the parts of the loss of the rows of `tape`; `trained`: `differentiated_steps`."""

    def trained_steps(self, window: tuple[int, ...], step: int) -> tuple[int, ...]:
        return self.differentiated_steps(step)

    def credit(self, rewards: Rewards) -> torch.Tensor:
        """Return 1 for each image: the signal is in the gradient of the reward."""
        return torch.ones(len(rewards.samples), self.config.sampling.num_inference_steps)

    def loss(self, rewards: torch.Tensor) -> torch.Tensor:
        """Return the losses [B] of rewards [B]."""
        settings = self.settings
        if settings.target is not None:
            return settings.loss_scale * (rewards - settings.target).abs()
        if settings.margin is not None:
            return settings.loss_scale * (settings.margin - rewards).relu()
        return -settings.loss_scale * rewards

    def train(
        self, policy: Policy, batch: Batch, rows: list[int], num_pairs: float, meter: StepGradients[Any] | None = None
    ) -> UpdateStats:
        tape = batch.tape if rows == list(range(batch.tape.batch_size)) else batch.tape.rows(rows)
        samples = [batch.samples[r] for r in rows]
        part = MicroBatch(tape, [s.prompt for s in samples], num_pairs / len(batch.trained))
        # first: `meter` measures the reward's gradient alone
        kl = self._add_kl_gradient(policy, batch, rows, num_pairs)
        for evaluation in self.evaluations(tape, batch.trained, samples):
            self._backpropagate(policy, part, evaluation, meter)
        sums = {name: value * len(batch.trained) for name, value in part.sums.items()}
        return UpdateStats(len(rows) * len(batch.trained), sums | kl)

    def _backpropagate(
        self, policy: Policy, part: MicroBatch, evaluation: RewardEvaluation, meter: StepGradients[Any] | None
    ) -> None:
        """Accumulate the gradient of one part of the loss."""
        tape, cfg = part.tape, self.settings.cfg
        gradient = self._gradient_at(policy, part, evaluation, self._decodable(policy, tape, evaluation.at))
        hops = evaluation.hops
        for number, hop in enumerate(hops):
            if meter is not None and hop.step != part.measured:
                meter.begin(hop.step)
                part.measured = hop.step
            for passed in hop.before:
                gradient = passed(gradient)
            carry = hop.nested > 0 and number + 1 < len(hops)
            options: dict[str, Any] = {"latents": hop.latents, "cfg": cfg, "carry": carry}
            latents = engine.backprop_step(policy.pipe, tape, hop.step, hop.leads_to, gradient, **options)
            if latents is not None:
                gradient = latents.direct + hop.nested * latents.through

    def _decodable(self, policy: Policy, tape: Tape, at: LatentJump | None) -> torch.Tensor:
        if at is None:
            return tape.steps[-1].x_next
        latents = {} if at.latents is None else {at.step: at.latents}
        options: dict[str, Any] = {"steps": [at.step], "latents": latents, "cfg": self.settings.cfg}
        return replayed(policy.pipe, tape, at.leads_to, **options)[at.step]

    def _gradient_at(
        self, policy: Policy, part: MicroBatch, evaluation: RewardEvaluation, latents: torch.Tensor
    ) -> torch.Tensor:
        """Return the gradient of the loss at `latents`, [B, ...] fp32, decoding a few images at a time."""
        gradients, count = list[torch.Tensor](), part.tape.batch_size
        weights = torch.as_tensor(evaluation.weights, device=latents.device).expand(count) / part.images
        each = len(latents) // count  # rows of a sample
        for start in range(0, count, self.settings.decode_batch):
            index = list(range(start, min(start + self.settings.decode_batch, count)))
            x = latents[start * each : (index[-1] + 1) * each].detach().clone().requires_grad_()
            with torch.autograd.graph.allow_mutation_on_saved_tensors():
                tape, prompts = part.tape.rows(index), [part.prompts[i] for i in index]
                rewards = torch.zeros(len(index), device=x.device)
                if self.decodes:
                    rewards = rewards + (evaluation.score or self.reward)(self.decode(policy.pipe, tape, x), prompts)
                if self.latent_reward is not None:
                    rewards = rewards + self.latent_reward(tape, x, prompts)
                losses = self.loss(rewards)
                gradients += torch.autograd.grad((weights[index] * losses).sum(), x)
            plain = weights[index].detach() * part.images if part.images != float("inf") else 0 * weights[index]
            part.sums["loss"] += float((plain * losses.detach()).sum())
            part.sums["tensor_reward"] += float((plain * rewards.detach()).sum())
            part.sums["without_gradient"] += float((losses == 0).sum())
        return torch.cat(gradients)

    def _add_kl_gradient(self, policy: Policy, batch: Batch, rows: list[int], num_pairs: float) -> dict[str, float]:
        """Accumulate the gradient of the squared distance to the base model at the trained steps; returns its sum."""
        if self.kl_coef == 0:
            return {}
        index = None if rows == list(range(batch.tape.batch_size)) else rows
        options: dict[str, Any] = {"steps": batch.trained, "index": index, "cfg": self.settings.cfg}
        base, measures = self.base_steps(policy, batch.tape, options), list[Measures]()

        def on_step(k: int, step: ReplayedStep) -> torch.Tensor:
            distances = per_sample((step.model_output - base[k].model_output).square())
            measures.append(Measures(0, {"kl": distances.sum()}))
            return self.kl_coef * self.weighted_kl(distances, batch, rows).sum() / num_pairs

        engine.replay(policy.pipe, batch.tape, on_step, **options)
        return summed(measures).sums


def mean(step: ReplayedStep) -> torch.Tensor:
    """Return the latents after a step without its noise, which has no gradient."""
    return step.mean


def chain(tape: Tape, active: dict[int, tuple[LeadsTo, float]], end: int | None = None) -> tuple[LatentJump, ...]:
    """Return the jumps through the `active` steps, backwards from before `end`; others pass the gradient by rule."""
    hops, position = [], len(tape.steps) if end is None else end
    for k in sorted(active, reverse=True):
        leads_to, nested = active[k]
        before = tuple(partial(latent_derivative, tape, i) for i in range(position - 1, k, -1))
        hops.append(LatentJump(k, leads_to, before, nested))
        position = k if nested > 0 else k + 1
    return tuple(hops)


def latent_derivative(tape: Tape, k: int, gradient: torch.Tensor, clean: bool = False) -> torch.Tensor:
    """Return the gradient of the latents before step `k` from that after it, with its output as data.

    `clean`: from that of the clean latents it predicts.
    """
    step = tape.steps[k]
    leaf = step.x.detach().clone().requires_grad_()
    led = (step.rule.clean if clean else step.rule.mean)(leaf, torch.zeros_like(leaf))
    (derivative,) = torch.autograd.grad(led, leaf, gradient)
    return derivative if step.written is None or (k == 0 and not clean) else derivative.masked_fill(step.written, 0.0)


def flow_rule(tape: Tape, k: int, name: str) -> FlowRule:
    """Return the rule of step `k`; raises `ReplayError` if it is not flow matching."""
    rule = tape.steps[k].rule
    if not isinstance(rule, transitions.FlowRule):
        raise ReplayError(
            f"algorithm.name={name}: its leaps between noise levels require flow matching, this pipeline has a "
            f"{type(rule).__name__.removesuffix('Rule')} scheduler; use draft, refl or draft_lv"
        )
    return rule


def generator(*seed: int | str) -> np.random.Generator:
    """Return the random generator of a trainer step, the same for all images."""
    return np.random.default_rng(derive_seed("gradient", *seed))


def step_by(rule: FlowRule, step: ReplayedStep) -> torch.Tensor:
    """Apply another rule than its own to a step."""
    return rule.mean(step.x, step.model_output)
