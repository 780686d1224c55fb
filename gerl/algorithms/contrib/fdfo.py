"""FDFO, finite difference flow optimisation (arXiv 2603.12893): the two images of a pair give the reward's gradient.

The images of a pair start from one noise and get a little noise of their own in their steps, so that they come out
slightly different. With half their differences d = (x - x_partner) / 2 in latents and dR = (R - R_partner) / 2 in
reward, R being smooth, dR = grad R . d to first order, and so

    g = dR d / mean(d^2),    whose mean over directions d that are all alike is grad R itself

(E d d^T / |d|^2 = 1 / D); directions in which trajectories differ more weigh more. Both images of a pair give the same
g, as d and dR change their signs together. The clean latents that a velocity v predicts are x0h = x - s v: to move them
by g is to move v against g. So the velocity at each trained step, v_ref under the policy that drew, is pulled towards
v_ref - u, u = d / mean(d^2), if dR > 0, and away from there otherwise. The whole trajectory is one action: all steps
get the same u. The ratio of a step,

    log r = |v_ref - v_target|^2 - |v - v_target|^2 = -mean(w^2 + 2 u w),    w = v - v_ref,  v_target = v_ref - u

is 1 at v_ref, where the gradient of -dR r by v is 2 g / D: descending, v moves against g. SPO's quadratic bound keeps
it near, L = -dR r + |dR| / (2 c) (r - 1)^2, whose minimum over r is at 1 + c sign(dR).

For any parametrisation w is the change of the transition's mean over -|J|, J = d mean / d model output: that of the
velocity of flow matching, of a predicted noise, or of predicted clean latents with the opposite sign.
"""

from __future__ import annotations  # of torch, see `lazy`

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gerl.algorithms.base import Algorithm, Batch, Rewards, StepGradients
from gerl.config import Config
from gerl.config.algorithms import AlgorithmConfig, Needs
from gerl.config.blocks import SamplingConfig
from gerl.config.schema import main_key
from gerl.errors import ConfigError
from gerl.protocol import RolloutTask, Sample, UpdateStats
from gerl.utils.lazy import lazy
from gerl.utils.seeding import derive_seed

if TYPE_CHECKING:
    import torch

    from gerl import engine
    from gerl.engine import ReplayedStep, transitions
    from gerl.model.policy import Policy
else:
    torch, engine, transitions = lazy("torch"), lazy("gerl.engine"), lazy("gerl.engine.transitions")

LEAST = 1e-6  # of mean(d^2), which is 0 where the images of a pair are the same


@dataclass(frozen=True)
class FDFOConfig(AlgorithmConfig):
    """The keys of FDFO."""

    ratio_width: float = main_key(
        0.03, "maximum distance from 1 to which the loss moves the ratio of a step (SPO)", above=0
    )

    @property
    def needs(self) -> Needs:
        guided = self.cfg != "off"  # what was recorded is what the update computes
        return replace(
            super().needs, trajectory=True, sampled_over="pair", recorded_means=guided, finished_latents=True
        )

    def check_sampling(self, sampling: SamplingConfig) -> None:
        if sampling.noise_level == 0 or sampling.kernel == "ode":
            name = "kernel=ode" if sampling.kernel == "ode" else "noise_level=0"
            raise ConfigError(
                f"sampling.{name}: the two images of a pair start from the same noise and are identical unless the "
                "steps have noise; use kernel=cps with noise_level=0.045"
            )


class FDFO(Algorithm):
    """Images 2i and 2i + 1 of a prompt are a pair."""

    names = "fdfo"
    settings: FDFOConfig

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.guided = self.needs.recorded_means

    @property
    def needs_all_samples(self) -> bool:
        return self.kl_coef > 0  # a pair without difference has a distance to the base model

    def plan(self, samples: Sequence[Sample], first_id: int = 0) -> list[RolloutTask]:
        return super().plan([self._from_noise_of_the_pair(sample) for sample in samples], first_id)

    def _from_noise_of_the_pair(self, sample: Sample) -> Sample:
        if sample.init_seed is not None:  # the whole group has the same
            return sample
        parts = (sample.step, sample.prompt.id, sample.index // 2)
        return replace(sample, init_seed=derive_seed("pair", self.config.trainer.seed, *parts))

    def advantages(self, rewards: Rewards) -> torch.Tensor:
        """dR of each sample, `[B]`: half the difference to its partner, divided by nothing."""
        return (rewards.totals - rewards.totals[partners(rewards.samples)]) / 2

    def train(
        self, policy: Policy, batch: Batch, rows: list[int], num_pairs: float, meter: StepGradients[Any] | None = None
    ) -> UpdateStats:
        settings, tape = self.settings, batch.tape
        index = None if rows == list(range(tape.batch_size)) else rows
        options: dict[str, Any] = {"steps": batch.trained, "index": index, "cfg": settings.cfg}
        options["step_batch"] = self.step_batch(meter)
        base = self.base_steps(policy, tape, options) if self.needs_all_samples else {}
        final, overwritten = tape.steps[-1].x_next, tape.overwritten(len(tape.steps) - 1)
        towards = directions(final, partners(batch.samples), overwritten)[rows]
        credit = batch.credit[rows].to(towards.device)
        stats = UpdateStats()

        def on_step(k: int, step: ReplayedStep) -> torch.Tensor:
            nonlocal stats
            if meter is not None:
                meter.begin(k)
            rollout_mean = step.recorded_mean if self.guided else step.mean.detach()
            assert rollout_mean is not None
            moved = step.part(velocity_change(step, rollout_mean))
            losses, measured = fdfo_loss(moved, step.part(towards), credit[:, k], settings.ratio_width)
            deviation = measured.pop("ratio_deviation")
            sums = {name: value * len(rows) for name, value in measured.items()} if self.guided else {}
            if base:
                kl = (step.part(velocity_change(step, base[k].mean)) ** 2).flatten(1).mean(1)
                losses = losses + self.kl_coef * self.weighted_kl(kl, batch, rows)
                sums["kl"] = float(kl.detach().sum())
            sums["loss"] = float(losses.detach().sum())
            stats += UpdateStats(len(rows), sums, deviation if self.guided else None)
            return losses.sum() / num_pairs

        engine.replay(policy.pipe, tape, on_step, **options)
        return stats


def partners(samples: Sequence[Sample]) -> torch.Tensor:
    """Where the other image of each sample's pair is among `samples`: `[B]` int64."""
    places = {(sample.group, sample.index): i for i, sample in enumerate(samples)}
    return torch.tensor([places[sample.group, sample.index ^ 1] for sample in samples], dtype=torch.int64)


def directions(finished: torch.Tensor, partner: torch.Tensor, overwritten: torch.Tensor | None = None) -> torch.Tensor:
    """u = d / mean(d^2) of the finished latents `[B, ...]`, d being half the difference to the partner: fp32.

    `overwritten` `[B, ...]` bool: what of them does not reach the images, where d is 0 and which the mean is not over.
    """
    finished = finished.float()
    d = (finished - finished[partner.to(finished.device)]) / 2
    d = d if overwritten is None else d.masked_fill(overwritten, 0.0)
    squares = transitions.unwritten(d**2, overwritten).flatten(1).mean(1).clamp_min(LEAST)
    return d / squares.view(-1, *[1] * (d.ndim - 1))


def velocity_change(step: ReplayedStep, mean: torch.Tensor) -> torch.Tensor:
    """By how much the velocity of `step` exceeds that which leads to `mean` `[B, ...]`: fp32, with graph."""
    return (mean - step.mean) / step.rule.jacobian


def fdfo_loss(
    moved: torch.Tensor, towards: torch.Tensor, reward: torch.Tensor, width: float
) -> tuple[torch.Tensor, dict[str, float]]:
    """L of the module `[B]`, and the metrics of a ratio; those of a clip count the rows beyond `width`.

    `moved` w and `towards` u `[B, ...]`, `reward` dR `[B]`, `width` c.
    """
    log_ratio = -(moved * (moved + 2 * towards)).flatten(1).mean(1)
    # far beyond any width, where an infinite ratio would make the gradient NaN
    ratio = log_ratio.clamp(-20, 20).exp()
    losses = -reward * ratio + reward.abs() / (2 * width) * (ratio - 1) ** 2
    off = ratio.detach() - 1
    names = ("ratio_deviation", "clip_fraction_low", "clip_fraction_high", "log_ratio_mean")
    values = (off.abs().max(), (off < -width).float().mean(), (off > width).float().mean(), log_ratio.detach().mean())
    return losses, dict(zip(names, torch.stack(values).tolist(), strict=True))  # one device synchronisation
