"""FlowBP (arXiv 2606.11075): surrogate trajectories for reward gradients, of random steps or of leaps."""

from __future__ import annotations  # torch is imported lazily

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from gerl.algorithms.common import requires
from gerl.algorithms.lazily import Tape, torch, transitions
from gerl.algorithms.leapalign import NESTED, TAU, leap_weights, sigma_at, two_steps, velocity_at
from gerl.algorithms.reward_gradient import (
    LatentJump,
    LeadsTo,
    RewardEvaluation,
    RewardGradient,
    RewardGradientConfig,
    chain,
    flow_rule,
    generator,
    step_by,
)
from gerl.config.schema import key, main_key
from gerl.errors import ConfigError
from gerl.protocol import Sample

ACTIVE = "steps whose denoiser calls have a gradient, selected at random each trainer step"
BIAS = "later steps are likelier: step i, from 1, has a probability proportional to i to this power"
RESCALE = "how far the gradient is scaled up for the steps that have none: 0 not, 1 by their share of the trajectory"


@requires(deterministic=True, leaps=True)
@dataclass(frozen=True)
class FlowBPSparseConfig(RewardGradientConfig):
    """Keys of FlowBP-Sparse."""

    active: int = main_key(4, ACTIVE, low=1)
    bias: float = key(1.0, BIAS)
    rescale: float = key(0.5, RESCALE, low=0, high=1)


@requires(latent_gradient=True, min_steps=2, leaps=True)
@dataclass(frozen=True)
class FlowBPBridgeConfig(FlowBPSparseConfig):
    """Keys of FlowBP-Bridge."""

    active: int = main_key(5, ACTIVE, low=2)
    bias: float = key(4.0, BIAS)
    rescale: float = key(0.0, RESCALE, low=0, high=1)
    nested: float = key(0.5, NESTED, low=0, high=1)


@requires(latent_gradient=True, deterministic=True, min_steps=3, leaps=True)
@dataclass(frozen=True)
class FlowBPLagrangeConfig(RewardGradientConfig):
    """Keys of FlowBP-Lagrange."""

    supports: int = key(3, "steps of a leap whose velocities are integrated by their interpolating polynomial", low=1)
    second: float = key(0.25, "factor of the gradient of a leap's second support; of the first: 1", low=0, high=1)
    parts: list[float] = key(
        [2.5, 6.0, 2.0],
        "Dirichlet parameters of the shares of the steps after, between and before the two leaps' starts",
    )
    latest: int | None = key(10, "the second leap starts at one of this many last steps but the last; null: any", low=2)
    nested: float = key(0.1, NESTED, low=0, high=1)
    tau: float | None = key(0.2, TAU, above=0)

    def check(self) -> None:
        super().check()
        if len(self.parts) != 3 or min(self.parts) <= 0:
            raise ConfigError(f"algorithm.parts={self.parts}: expected three positive numbers")


class FlowBPSparse(RewardGradient):
    """FlowBP-Sparse (arXiv 2606.11075): random steps, biased to late ones, with detached latents in their calls."""

    names = "flowbp_sparse"
    settings: FlowBPSparseConfig

    def differentiated_steps(self, step: int) -> tuple[int, ...]:
        total = self.config.sampling.num_inference_steps
        rng = generator(self.config.trainer.seed, step)
        return tuple(late_biased(range(total), self.settings.active, self.settings.bias, rng))

    def evaluations(self, tape: Tape, trained: tuple[int, ...], samples: Sequence[Sample]) -> list[RewardEvaluation]:
        scaled = self.scaled(tape, trained)
        return [RewardEvaluation(chain(tape, {k: (scaled[k], 0.0) for k in trained}))]

    def scaled(self, tape: Tape, trained: tuple[int, ...]) -> dict[int, LeadsTo]:
        """Return the targets of the trained steps, with velocities scaled up to make up for steps without gradient."""
        rules = [flow_rule(tape, k, self.settings.name) for k in range(len(tape.steps))]
        factor = scale_up([rule.dt for rule in rules], trained, self.settings.rescale)
        return {k: partial(step_by, transitions.leap(rules[k], rules[k].sigma + factor * rules[k].dt)) for k in trained}


class FlowBPBridge(FlowBPSparse):
    """FlowBP-Bridge (arXiv 2606.11075): like Sparse, but the latents of one step in between have a gradient."""

    names = "flowbp_bridge"
    settings: FlowBPBridgeConfig

    def _bridge(self, step: int) -> int:
        """Return the step in between, which has steps before it."""
        return two_steps(self.config.sampling.num_inference_steps, generator(self.config.trainer.seed, step))[1]

    def differentiated_steps(self, step: int) -> tuple[int, ...]:
        total, j = self.config.sampling.num_inference_steps, self._bridge(step)
        rng, settings = generator(self.config.trainer.seed, step, "sides"), self.settings
        before, after = split_count(settings.active, j, total - j)
        early = late_biased(range(j), before, settings.bias, rng)
        late = late_biased(range(j + 1, total), after - 1, settings.bias, rng) if j + 1 < total else []
        return (*early, j, *late)

    def evaluations(self, tape: Tape, trained: tuple[int, ...], samples: Sequence[Sample]) -> list[RewardEvaluation]:
        scaled, j, nested = self.scaled(tape, trained), self._bridge(samples[0].step), self.settings.nested
        return [RewardEvaluation(chain(tape, {k: (scaled[k], nested if k == j else 0.0) for k in trained}))]


class FlowBPLagrange(RewardGradient):
    """FlowBP-Lagrange (arXiv 2606.11075): like LeapAlign, with leaps by quadrature of the steps' velocities."""

    names = "flowbp_lagrange"
    settings: FlowBPLagrangeConfig

    def _supports(self, step: int) -> list[list[int]]:
        """Return the supporting steps of the first and of the second leap."""
        total, settings = self.config.sampling.num_inference_steps, self.settings
        k, j = parted_steps(total, settings.parts, settings.latest, generator(self.config.trainer.seed, step))
        return [spread_supports(k, j, settings.supports), spread_supports(j, total, settings.supports)]

    def differentiated_steps(self, step: int) -> tuple[int, ...]:
        return tuple(i for supports in self._supports(step) for i in supports[: 2 if self.settings.second else 1])

    def evaluations(self, tape: Tape, trained: tuple[int, ...], samples: Sequence[Sample]) -> list[RewardEvaluation]:
        settings, step = self.settings, samples[0].step
        first, second = self._supports(step)
        hops: list[LatentJump] = []
        arrived = []
        for supports, end in ((first, second[0]), (second, len(tape.steps))):
            rules = [flow_rule(tape, i, settings.name) for i in supports]
            start, goal = rules[0].sigma, sigma_at(tape, end)
            weights = lagrange_weights([rule.sigma for rule in rules], start, goal)
            parts = list(zip(supports, rules, weights, strict=True))
            led = [
                transitions.leap(rule, rule.sigma + w).mean(tape.steps[i].x, velocity_at(tape, i)) - tape.steps[i].x
                for i, rule, w in parts
            ]
            arrived.append(tape.steps[supports[0]].x + torch.stack(led).sum(0))
            first_leap = partial(step_by, transitions.leap(rules[0], start + weights[0]))
            leap = LatentJump(supports[0], first_leap, nested=settings.nested)
            other = [
                LatentJump(i, partial(step_by, transitions.leap(rule, rule.sigma + settings.second * w)))
                for i, rule, w in parts[1:2]
                if settings.second
            ]
            hops = [*other, leap, *hops]  # the second leap comes first, since jumps are ordered backwards
        return [RewardEvaluation(tuple(hops), weights=leap_weights(tape, second[0], arrived, settings.tau))]


def late_biased(steps: range, count: int, bias: float, rng: np.random.Generator) -> list[int]:
    """Sample `count` distinct `steps`, in order; the i-th step (from 1) has weight `i ** bias`."""
    count = min(count, len(steps))
    weights = np.arange(1, len(steps) + 1, dtype=np.float64) ** bias
    chosen = rng.choice(len(steps), count, replace=False, p=weights / weights.sum())
    return sorted(steps[int(i)] for i in chosen)


def parted_steps(total: int, parts: Sequence[float], latest: int | None, rng: np.random.Generator) -> tuple[int, int]:
    """Sample steps k < j of `total`; the numbers of steps after j, between, and up to k are Dirichlet distributed.

    Each is at least one. j is one of the last `latest` steps; excess steps after it go to the share up to k.
    """
    shares = rng.dirichlet(parts)
    counts = np.round(shares * total).astype(int)
    counts[shares.argmax()] += total - counts.sum()
    counts = counts.clip(min=1)
    counts[counts.argmax()] += total - counts.sum()
    after, between, _ = counts.tolist()
    j = total - 1 - min(after, max(1, (latest or total) - 1))
    return j - between, j


def split_count(count: int, before: int, after: int) -> tuple[int, int]:
    """Divide `count` active steps in proportion to the `before` and `after` steps, at least one each."""
    count = min(count, before + after)
    first = min(max(round(count * before / (before + after)), 1, count - after), before, count - 1)
    return first, count - first


def scale_up(lengths: Sequence[float], active: Sequence[int], rescale: float) -> float:
    """Return `1 + rescale * (whole / active - 1)`, the ratio of the lengths of all and of the `active` steps."""
    whole, part = sum(map(abs, lengths)), sum(abs(lengths[k]) for k in active)
    return 1 + rescale * (whole / part - 1)


def spread_supports(start: int, end: int, count: int) -> list[int]:
    """Return at most `count` evenly spread steps of [start, end), beginning with `start`."""
    if end - start <= count:
        return list(range(start, end))
    places = np.linspace(0, end - start - 1, count).round().astype(int).tolist()
    return sorted({start, *(start + p for p in places[1:])})


def lagrange_weights(points: Sequence[float], start: float, end: float) -> list[float]:
    """Return the integrals from `start` to `end` of the Lagrange basis polynomials of distinct `points`."""
    weights = []
    for i, point in enumerate(points):
        others = [other for j, other in enumerate(points) if j != i]
        basis = np.poly1d(others, r=True) if others else np.poly1d([1.0])
        integral = np.polyint(basis)
        weights.append(float((integral(end) - integral(start)) / np.prod([point - other for other in others])))
    return weights
