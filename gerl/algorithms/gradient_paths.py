"""The published reward gradients: where each looks, and through which steps it goes back."""

from __future__ import annotations  # of the model, which the driver of a run does not have

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gerl.algorithms.base import Batch, KLWeight, Rewards, StepGradients
from gerl.algorithms.flow_grpo import FlowGRPO
from gerl.algorithms.reward_gradient import (
    LatentJump,
    LeadsTo,
    RewardEvaluation,
    RewardGradient,
    Score,
    chain,
    drawn_length,
    evenly_spread,
    flow_rule,
    generator,
    handed_on_clean,
    lagrange_weights,
    late_biased,
    mean,
    parted_steps,
    predicted,
    scale_up,
    split_count,
    spread_supports,
    two_steps,
)
from gerl.config import Config
from gerl.config.algorithms import (
    DRaFTConfig,
    DRaFTLVConfig,
    DRTuneConfig,
    FlowBPBridgeConfig,
    FlowBPLagrangeConfig,
    FlowBPSparseConfig,
    LeapAlignConfig,
    MixedGradientConfig,
    ReFLConfig,
    SRPOConfig,
)
from gerl.engine import ReplayedStep, Tape
from gerl.engine.transitions import FlowRule, leap
from gerl.errors import ReplayError
from gerl.protocol import Prompt, Sample, StepFacts, UpdateStats
from gerl.utils.seeding import derive_seed, sample_generators

if TYPE_CHECKING:
    from gerl.model.policy import Policy


# --- The published reward gradients: where each looks, and through which steps it goes back.
#
# Sources, with what is not as published: `configs/algorithm/` and `docs/algorithms.md`.


class DRaFT(RewardGradient):
    """DRaFT-K (arXiv 2309.17400): the gradient of the finished images through the last K steps.

    AlignProp (arXiv 2310.03739) draws K anew each trainer step.
    """

    settings: DRaFTConfig

    def drawn(self, step: int) -> tuple[int, ...]:
        total, draw = self.config.sampling.num_inference_steps, generator(self.config.trainer.seed, step)
        length = drawn_length(self.settings.last, self.settings.last_std, total, draw)
        return tuple(range(total - length, total))

    def looks(self, tape: Tape, trained: tuple[int, ...], samples: Sequence[Sample]) -> list[RewardEvaluation]:
        return [RewardEvaluation(chain(tape, dict.fromkeys(trained, (mean, 1.0))))]


class DRaFTLV(RewardGradient):
    """DRaFT-LV (arXiv 2309.17400): the last step, and finished images noised again to its level."""

    settings: DRaFTLVConfig

    def drawn(self, step: int) -> tuple[int, ...]:
        return (self.config.sampling.num_inference_steps - 1,)

    def looks(self, tape: Tape, trained: tuple[int, ...], samples: Sequence[Sample]) -> list[RewardEvaluation]:
        (last,), count = trained, self.settings.noised_copies + 1
        looks = [RewardEvaluation(chain(tape, {last: (mean, 0.0)}), weights=1 / count)]
        rule, finished = tape.steps[last].rule, tape.steps[-1].x_next
        for copy in range(1, count):
            noise = sampled_noise(finished, [("low variance", copy, s.seed) for s in samples])
            hop = LatentJump(last, predicted, latents=rule.noised(finished, noise))
            looks.append(RewardEvaluation((hop,), at=hop, weights=1 / count))
        return looks


class ReFL(RewardGradient):
    """ReFL (arXiv 2304.05977): the image that one late step predicts, drawn anew each trainer step."""

    settings: ReFLConfig

    def drawn(self, step: int) -> tuple[int, ...]:
        return (late_step(self, self.settings.late, step),)

    def looks(self, tape: Tape, trained: tuple[int, ...], samples: Sequence[Sample]) -> list[RewardEvaluation]:
        hop = LatentJump(trained[0], predicted)
        return [RewardEvaluation((hop,), at=hop)]


class DRTune(RewardGradient):
    """DRTune (arXiv 2405.00760): the image that one late step predicts, through a few steps up to it.

    The latents that a step begins with are data to its denoiser call, and have their gradient by the rules.
    """

    settings: DRTuneConfig

    def drawn(self, step: int) -> tuple[int, ...]:
        stop = self._stop(step)
        draw = generator(self.config.trainer.seed, step, "spread")
        return tuple(evenly_spread(stop + 1, self.settings.active, draw))

    def _stop(self, step: int) -> int:
        return late_step(self, self.settings.late, step)

    def trained_steps(self, window: tuple[int, ...], step: int) -> tuple[int, ...]:
        return tuple(sorted({*self.drawn(step), self._stop(step)}))  # the denoiser runs there, if without gradient

    def looks(self, tape: Tape, trained: tuple[int, ...], samples: Sequence[Sample]) -> list[RewardEvaluation]:
        step = samples[0].step
        stop, active = self._stop(step), self.drawn(step)
        at = LatentJump(stop, predicted)
        earlier = chain(tape, {k: (mean, 0.0) for k in active if k < stop}, end=stop)
        onward = partial(handed_on_clean, tape, stop)
        if earlier:
            first = earlier[0]
            earlier = (LatentJump(first.step, first.leads_to, (onward, *first.before), first.nested), *earlier[1:])
        return [RewardEvaluation((at, *earlier) if stop in active else earlier, at=at)]


class LeapAlign(RewardGradient):
    """LeapAlign (arXiv 2604.15311): two leaps stand for all steps in the gradient, between two that are drawn."""

    settings: LeapAlignConfig

    def drawn(self, step: int) -> tuple[int, ...]:
        total = self.config.sampling.num_inference_steps
        return two_steps(total, generator(self.config.trainer.seed, step))

    def looks(self, tape: Tape, trained: tuple[int, ...], samples: Sequence[Sample]) -> list[RewardEvaluation]:
        (k, j), name = trained, self.settings.name
        leaps = {i: leap(flow_rule(tape, i, name), sigma_at(tape, end)) for i, end in ((k, j), (j, len(tape.steps)))}
        arrived = {i: rule.mean(tape.steps[i].x, said(tape, i)) for i, rule in leaps.items()}
        hops = (
            LatentJump(j, partial(by_rule, leaps[j]), nested=self.settings.nested),
            LatentJump(k, partial(by_rule, leaps[k])),
        )
        return [RewardEvaluation(hops, weights=likeness(tape, j, [arrived[k], arrived[j]], self.settings.tau))]


class FlowBPSparse(RewardGradient):
    """FlowBP-Sparse (arXiv 2606.11075): some steps, later ones likelier, whose latents are data to their calls."""

    settings: FlowBPSparseConfig

    def drawn(self, step: int) -> tuple[int, ...]:
        total = self.config.sampling.num_inference_steps
        draw = generator(self.config.trainer.seed, step)
        return tuple(late_biased(range(total), self.settings.active, self.settings.bias, draw))

    def looks(self, tape: Tape, trained: tuple[int, ...], samples: Sequence[Sample]) -> list[RewardEvaluation]:
        scaled = self.scaled(tape, trained)
        return [RewardEvaluation(chain(tape, {k: (scaled[k], 0.0) for k in trained}))]

    def scaled(self, tape: Tape, trained: tuple[int, ...]) -> dict[int, LeadsTo]:
        """The ends of the trained steps, whose velocities count more for those that have no gradient."""
        rules = [flow_rule(tape, k, self.settings.name) for k in range(len(tape.steps))]
        factor = scale_up([rule.dt for rule in rules], trained, self.settings.rescale)
        return {k: partial(by_rule, leap(rules[k], rules[k].sigma + factor * rules[k].dt)) for k in trained}


class FlowBPBridge(FlowBPSparse):
    """FlowBP-Bridge (arXiv 2606.11075): as Sparse, but the latents of one step in between have a gradient."""

    settings: FlowBPBridgeConfig

    def _bridge(self, step: int) -> int:
        """The step in between, with steps before it."""
        return two_steps(self.config.sampling.num_inference_steps, generator(self.config.trainer.seed, step))[1]

    def drawn(self, step: int) -> tuple[int, ...]:
        total, j = self.config.sampling.num_inference_steps, self._bridge(step)
        draw, settings = generator(self.config.trainer.seed, step, "sides"), self.settings
        before, after = split_count(settings.active, j, total - j)
        early = late_biased(range(j), before, settings.bias, draw)
        late = late_biased(range(j + 1, total), after - 1, settings.bias, draw) if j + 1 < total else []
        return (*early, j, *late)

    def looks(self, tape: Tape, trained: tuple[int, ...], samples: Sequence[Sample]) -> list[RewardEvaluation]:
        scaled, j = self.scaled(tape, trained), self._bridge(samples[0].step)
        return [
            RewardEvaluation(chain(tape, {k: (scaled[k], self.settings.nested if k == j else 0.0) for k in trained}))
        ]


class FlowBPLagrange(RewardGradient):
    """FlowBP-Lagrange (arXiv 2606.11075): as LeapAlign, its leaps being quadratures of the steps' velocities."""

    settings: FlowBPLagrangeConfig

    def _starts(self, step: int) -> tuple[int, int]:
        total, settings = self.config.sampling.num_inference_steps, self.settings
        return parted_steps(total, settings.parts, settings.latest, generator(self.config.trainer.seed, step))

    def _supports(self, step: int) -> list[list[int]]:
        """Of the first and of the second leap."""
        (k, j), total = self._starts(step), self.config.sampling.num_inference_steps
        return [spread_supports(k, j, self.settings.supports), spread_supports(j, total, self.settings.supports)]

    def drawn(self, step: int) -> tuple[int, ...]:
        return tuple(i for supports in self._supports(step) for i in supports[: 2 if self.settings.second else 1])

    def looks(self, tape: Tape, trained: tuple[int, ...], samples: Sequence[Sample]) -> list[RewardEvaluation]:
        settings, step = self.settings, samples[0].step
        first, second = self._supports(step)
        hops: list[LatentJump] = []
        arrived = []
        for supports, end in ((first, second[0]), (second, len(tape.steps))):
            rules = [flow_rule(tape, i, settings.name) for i in supports]
            start, goal = rules[0].sigma, sigma_at(tape, end)
            weights = lagrange_weights([rule.sigma for rule in rules], start, goal)
            parts = zip(supports, rules, weights, strict=True)
            led = [
                leap(rule, rule.sigma + w).mean(tape.steps[i].x, said(tape, i)) - tape.steps[i].x
                for i, rule, w in parts
            ]
            arrived.append(tape.steps[supports[0]].x + torch.stack(led).sum(0))
            own = LatentJump(supports[0], partial(by_rule, leap(rules[0], start + weights[0])), nested=settings.nested)
            other = [
                LatentJump(i, partial(by_rule, leap(rule, rule.sigma + settings.second * w)))
                for i, rule, w in list(zip(supports, rules, weights, strict=True))[1:2]
                if settings.second
            ]
            hops = [*other, own, *hops]  # the second leap's come first
        return [RewardEvaluation(tuple(hops), weights=likeness(tape, second[0], arrived, settings.tau))]


def late_step(algorithm: RewardGradient, last: int, step: int) -> int:
    """One of the last so many steps, drawn for trainer step `step`."""
    total = algorithm.config.sampling.num_inference_steps
    draw = generator(algorithm.config.trainer.seed, step)
    return int(draw.integers(total - min(last, total), total))


def by_rule(rule: FlowRule, step: ReplayedStep) -> torch.Tensor:
    """Where another rule than its own leads from a step."""
    return rule.mean(step.x, step.model_output)


def sigma_at(tape: Tape, k: int) -> float:
    """The noise level before step `k`, or after the last one."""
    return tape.steps[k].rule.sigma if k < len(tape.steps) else tape.steps[-1].rule.sigma_next


def said(tape: Tape, k: int) -> torch.Tensor:
    """The model output at a deterministic step of flow matching, from where it led."""
    step = tape.steps[k]
    velocity = (step.x_next - step.x) / step.rule.dt
    return -velocity if getattr(step.rule, "inverted", False) else velocity


def likeness(tape: Tape, j: int, arrived: Sequence[torch.Tensor], tau: float | None) -> float | torch.Tensor:
    """The weights `[B]` of images by how near two leaps `arrived` to the latents of step `j`, and to the finished."""
    if tau is None:
        return 1.0
    pairs = zip((tape.steps[j].x, tape.steps[-1].x_next), arrived, strict=True)
    distances = [(a - b).abs().reshape(tape.batch_size, -1).mean(1).clamp_min(tau) for a, b in pairs]
    return 1 / (distances[0] + distances[1])


def sampled_noise(like: torch.Tensor, seeds: Sequence[tuple[int | str, ...]]) -> torch.Tensor:
    """Standard normal noise as `like` `[B, ...]`, from a seed for each sample."""
    shape = (len(like) // len(seeds), *like.shape[1:])
    drawn = [torch.randn(shape, generator=g) for g in sample_generators([derive_seed(*seed) for seed in seeds])]
    return torch.cat(drawn).to(like.device)


# --- A policy gradient and a reward gradient in one update, by weights.
#
# The policy gradient (Flow-GRPO) learns from all scorers by their advantages; the scorers that have a gradient give it
# besides, through the last steps (DRaFT). A scorer without one, such as OCR, counts by the former alone.


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

    def looks(self, tape: Tape, trained: tuple[int, ...], samples: Sequence[Sample]) -> list[RewardEvaluation]:
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


# --- SRPO (arXiv 2509.06942): finished images noised again, one step, and the clean image recovered by the known noise.
#
# The noise is the one that the image was drawn from. One step denoises to a noise level from a higher one, another
# inverts to it from a lower one; both are undone by the known noise, so that early levels have a sharp image too. The
# reward is relative: with a wanted word before the prompt less that with an unwanted one, and the other way round where
# a step inverts. What moves both, as shifts in style that a reward model likes whatever the prompt, cancels.

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

    def looks(self, tape: Tape, trained: tuple[int, ...], samples: Sequence[Sample]) -> list[RewardEvaluation]:
        settings, step = self.settings, samples[0].step
        rules = [flow_rule(tape, k, settings.name) for k in trained]
        sigmas = [rule.sigma for rule in rules]
        above, below = self.starts(sigmas, step)
        goal = middle(sigmas, (above, below))
        finished = tape.steps[-1].x_next
        noise = tape.steps[0].x
        if tape.steps[0].rule.sigma < PURE:  # it begins from a picture
            noise = sampled_noise(finished, [("srpo", s.seed) for s in samples])
        draw = generator(self.config.trainer.seed, step, "words")
        wanted, unwanted = (str(draw.choice(words)) for words in (settings.positive, settings.negative))
        looks = []
        for k, strength, words in (
            (above, settings.strength, (wanted, unwanted)),
            (below, settings.inverted_strength, (unwanted, wanted)),
        ):
            counts = 1 + float(np.interp(min(sigmas[k], goal), settings.levels, strength))
            recover = partial(recovered, leap(rules[k], goal), noise)
            hop = LatentJump(trained[k], recover, latents=rules[k].noised(finished, noise))
            looks.append(RewardEvaluation((hop,), at=hop, weights=0.5, score=self._relative(counts, *words)))
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
