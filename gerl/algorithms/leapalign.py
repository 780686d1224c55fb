"""LeapAlign (arXiv 2604.15311): two leaps replace all steps in the gradient of a reward."""

from __future__ import annotations  # torch is imported lazily

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from gerl.algorithms.common import requires
from gerl.algorithms.lazily import Tape, torch, transitions
from gerl.algorithms.reward_gradient import (
    LatentJump,
    RewardEvaluation,
    RewardGradient,
    RewardGradientConfig,
    flow_rule,
    generator,
    step_by,
)
from gerl.config.schema import key
from gerl.protocol import Sample

NESTED = "share of the gradient of the intermediate latents that passes through the denoiser's call with them"
TAU = "image weights are 1 / (the distances of the leaps from the sampled steps, each at least this); null: equal"


@requires(latent_gradient=True, deterministic=True, min_steps=2, leaps=True)
@dataclass(frozen=True)
class LeapAlignConfig(RewardGradientConfig):
    """Keys of LeapAlign."""

    nested: float = key(0.3, NESTED, low=0, high=1)
    tau: float | None = key(0.1, TAU, above=0)


class LeapAlign(RewardGradient):
    """LeapAlign (arXiv 2604.15311): two leaps, from two random steps, replace all steps in the gradient."""

    names = "leapalign"
    settings: LeapAlignConfig

    def differentiated_steps(self, step: int) -> tuple[int, ...]:
        total = self.config.sampling.num_inference_steps
        return two_steps(total, generator(self.config.trainer.seed, step))

    def evaluations(self, tape: Tape, trained: tuple[int, ...], samples: Sequence[Sample]) -> list[RewardEvaluation]:
        (k, j), name = trained, self.settings.name
        ends = {k: sigma_at(tape, j), j: sigma_at(tape, len(tape.steps))}
        leaps = {i: transitions.leap(flow_rule(tape, i, name), end) for i, end in ends.items()}
        arrived = {i: rule.mean(tape.steps[i].x, velocity_at(tape, i)) for i, rule in leaps.items()}
        hops = (
            LatentJump(j, partial(step_by, leaps[j]), nested=self.settings.nested),
            LatentJump(k, partial(step_by, leaps[k])),
        )
        return [RewardEvaluation(hops, weights=leap_weights(tape, j, [arrived[k], arrived[j]], self.settings.tau))]


def two_steps(total: int, rng: np.random.Generator) -> tuple[int, int]:
    """Sample two distinct steps of `total`, in order, uniformly over pairs."""
    k, j = sorted(rng.choice(total, 2, replace=False).tolist())
    return k, j


def sigma_at(tape: Tape, k: int) -> float:
    """Return the noise level before step `k`, or after the last step."""
    return tape.steps[k].rule.sigma if k < len(tape.steps) else tape.steps[-1].rule.sigma_next


def velocity_at(tape: Tape, k: int) -> torch.Tensor:
    """Return the model output at a deterministic flow-matching step, recovered from its latents."""
    step = tape.steps[k]
    velocity = (step.x_next - step.x) / step.rule.dt
    return -velocity if getattr(step.rule, "inverted", False) else velocity


def leap_weights(tape: Tape, j: int, arrived: Sequence[torch.Tensor], tau: float | None) -> float | torch.Tensor:
    """Return weights `[B]` by the distances of two leaps from the latents of step `j` and from the final latents."""
    if tau is None:
        return 1.0
    pairs = zip((tape.steps[j].x, tape.steps[-1].x_next), arrived, strict=True)
    distances = [(a - b).abs().reshape(tape.batch_size, -1).mean(1).clamp_min(tau) for a, b in pairs]
    return 1 / (distances[0] + distances[1])
