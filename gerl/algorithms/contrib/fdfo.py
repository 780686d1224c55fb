"""FDFO, finite difference flow optimisation (arXiv 2603.12893): reward gradients from pairs of images.

The images of a pair share their initial noise and differ slightly by a small noise in the steps. Let d = (x -
x_partner) / 2 and dR = (R - R_partner) / 2 be half their differences in latents and reward. For a smooth R, dR =
grad R . d to first order, so that the mean of g = dR d / mean(d^2) over isotropic directions d is grad R. The clean
latents predicted by a velocity v are x - s v: to move them by g is to move v against g. Hence the velocity at each
trained step, v_ref under the sampling policy, is pulled towards v_ref - u with u = d / mean(d^2) if dR > 0, and pushed
away otherwise. The whole trajectory is one action, so all steps share u. The ratio of a step,

    log r = |v_ref - v_target|^2 - |v - v_target|^2 = -mean(w^2 + 2 u w),    w = v - v_ref,  v_target = v_ref - u

is 1 at v_ref, where the gradient of -dR r with respect to v is 2 g / D. SPO's quadratic bound keeps r near 1:
L = -dR r + |dR| / (2 c) (r - 1)^2 has its minimum over r at 1 + c sign(dR).

For any parametrisation, w is the change of the transition's mean divided by -|J|, J = d mean / d model output.
"""

from __future__ import annotations  # torch is imported lazily

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gerl.algorithms.base import Algorithm, Batch, Measures, Rewards, summed
from gerl.algorithms.common import per_sample
from gerl.algorithms.core_algos import Metrics
from gerl.algorithms.lazily import Policy, ReplayedStep, StepGradients, engine, torch, transitions
from gerl.config import Config
from gerl.config.algorithms import AlgorithmConfig, Needs
from gerl.config.blocks import SamplingConfig
from gerl.config.schema import main_key
from gerl.errors import ConfigError
from gerl.protocol import RolloutTask, Sample, UpdateStats
from gerl.utils.seeding import derive_seed

LEAST = 1e-6  # lower bound of mean(d^2), which is 0 for equal images


@dataclass(frozen=True)
class FDFOConfig(AlgorithmConfig):
    """Keys of FDFO."""

    ratio_width: float = main_key(0.03, "maximum distance from 1 to which the loss moves a step's ratio (SPO)", above=0)

    @property
    def needs(self) -> Needs:
        guided, needs = self.cfg != "off", super().needs  # guided: the update computes the recorded policy
        return replace(needs, trajectory=True, sampled_over="pair", recorded_means=guided, finished_latents=True)

    def check_sampling(self, sampling: SamplingConfig) -> None:
        if sampling.noise_level == 0 or sampling.kernel == "ode":
            name = "kernel=ode" if sampling.kernel == "ode" else "noise_level=0"
            raise ConfigError(
                f"sampling.{name}: the two images of a pair start from the same noise and are identical unless the "
                "steps have noise; use kernel=cps with noise_level=0.045"
            )


class FDFO(Algorithm):
    """FDFO; images 2i and 2i + 1 of a prompt form a pair."""

    names = "fdfo"
    settings: FDFOConfig
    kl_on_all = True  # pairs without a difference too

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.guided = self.needs.recorded_means

    def plan(self, samples: Sequence[Sample], first_id: int = 0) -> list[RolloutTask]:
        def paired(s: Sample) -> Sample:
            seed = derive_seed("pair", self.config.trainer.seed, s.step, s.prompt.id, s.index // 2)
            return s if s.init_seed is not None else replace(s, init_seed=seed)  # or the group shares its noise

        return super().plan([paired(sample) for sample in samples], first_id)

    def advantages(self, rewards: Rewards) -> torch.Tensor:
        """Return dR `[B]`: half the reward difference to the partner, not normalised."""
        return (rewards.totals - rewards.totals[partners(rewards.samples)]) / 2

    def train(
        self, policy: Policy, batch: Batch, rows: list[int], num_pairs: float, meter: StepGradients[Any] | None = None
    ) -> UpdateStats:
        settings, tape = self.settings, batch.tape
        options = self.replay_options(batch, rows, meter)
        base = self.base_steps(policy, tape, options) if self.needs_all_samples else {}
        final, overwritten = tape.steps[-1].x_next, tape.overwritten(len(tape.steps) - 1)
        towards = directions(final, partners(batch.samples), overwritten)[rows]
        credit = batch.credit[rows].to(towards.device)
        measures: list[Measures] = []

        def on_step(k: int, step: ReplayedStep) -> torch.Tensor:
            rollout_mean = step.recorded_mean if self.guided else step.mean.detach()
            assert rollout_mean is not None
            moved = step.part(velocity_change(step, rollout_mean))
            losses, measured = fdfo_loss(moved, step.part(towards), credit[:, k], settings.ratio_width)
            deviation = measured.pop("ratio_deviation")
            sums: Metrics = {}
            if base:
                kl = per_sample(step.part(velocity_change(step, base[k].mean)) ** 2)
                losses = losses + self.kl_coef * self.weighted_kl(kl, batch, rows)
                sums["kl"] = kl.detach().sum()
            sums["loss"] = losses.detach().sum()
            measures.append(
                Measures(len(rows), sums, measured if self.guided else {}, deviation if self.guided else None)
            )
            return losses.sum() / num_pairs

        engine.replay(policy.pipe, tape, on_step, **options)
        return summed(measures)


def partners(samples: Sequence[Sample]) -> torch.Tensor:
    """Return the index of each sample's partner in `samples`: `[B]` int64."""
    places = {(sample.group, sample.index): i for i, sample in enumerate(samples)}
    return torch.tensor([places[sample.group, sample.index ^ 1] for sample in samples], dtype=torch.int64)


def directions(finished: torch.Tensor, partner: torch.Tensor, overwritten: torch.Tensor | None = None) -> torch.Tensor:
    """Return u = d / mean(d^2) [B, ...] fp32 of the final latents; d is 0 where `overwritten`, which the mean omits."""
    finished = finished.float()
    d = (finished - finished[partner.to(finished.device)]) / 2
    d = d if overwritten is None else d.masked_fill(overwritten, 0.0)
    squares = (transitions.unwritten(d, overwritten) ** 2).flatten(1).mean(1).clamp_min(LEAST)
    return d / squares.view(-1, *[1] * (d.ndim - 1))


def velocity_change(step: ReplayedStep, mean: torch.Tensor) -> torch.Tensor:
    """Return the velocity of `step` minus the velocity that leads to `mean` `[B, ...]`: fp32, with graph."""
    return (mean - step.mean) / step.rule.jacobian


def fdfo_loss(
    moved: torch.Tensor, towards: torch.Tensor, reward: torch.Tensor, width: float
) -> tuple[torch.Tensor, Metrics]:
    """Return L [B] and ratio metrics from w, u [B, ...], dR [B] and c; clip fractions count rows beyond `width`."""
    log_ratio = -per_sample(moved * (moved + 2 * towards))
    # the bound is far beyond any width; an infinite ratio would make the gradient NaN
    ratio = log_ratio.clamp(-20, 20).exp()
    losses = -reward * ratio + reward.abs() / (2 * width) * (ratio - 1) ** 2
    off = ratio.detach() - 1
    names = ("ratio_deviation", "clip_fraction_low", "clip_fraction_high", "log_ratio_mean")
    values = (off.abs().max(), (off < -width).float().mean(), (off > width).float().mean(), log_ratio.detach().mean())
    return losses, dict(zip(names, values, strict=True))
