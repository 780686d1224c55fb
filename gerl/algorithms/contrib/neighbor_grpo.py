"""Neighbor GRPO (arXiv 2511.16955): ODE trajectories from similar initial noises, with a policy by distance.

The images of a prompt start from noises around a shared one, `sqrt(1 - s^2) e + s d_i` with `s` =
`sampling.init_noise_spread` (equation 7), and follow the ODE. The trained policy is a surrogate: at step k a
trajectory, the anchor, may leap to the latents x_i of any of the G trajectories of the group, with a probability that
decreases with the distance from x, the anchor's next latents under the trained weights (equation 8),

    pi(i) = softmax_i(-|x_i - x|^2 / temperature),    |.|^2 the mean over dimensions (the papers: the sum),

and its ratio to the sampling policy enters PPO's clipped surrogate, averaged over the group's advantages A_i (equation
9). On policy with centred A the gradient, `2 / temperature sum_i A_i mean((x_i - x) grad x)`, pulls the anchor towards
neighbours with good rewards. All pairs of neighbours have similar distances, so any image may be the anchor: `anchors`
images per group are sampled each trainer step, and only they are evaluated, from the recorded latents.

Advantages are divided by their p-norm, `sqrt(G) A / |A|_p` (equation 11), which for p = 2 is the standard deviation.
The authors repeat the equations, with the temperature, in arXiv 2603.17461, section 3.1. Second-order solvers are not
supported, since the anchor's step that is compared with the rollout's is an Euler step.
"""

from __future__ import annotations  # torch is imported lazily

from dataclasses import dataclass
from typing import Any

from gerl.algorithms.base import Algorithm, Batch, ClippedConfig, Measures, NormalisedConfig, Rewards, group_ids, summed
from gerl.algorithms.common import requires
from gerl.algorithms.core_algos import Metrics, clipped_policy_loss
from gerl.algorithms.lazily import Policy, ReplayedStep, StepGradients, engine, torch
from gerl.algorithms.planning import sampled_steps
from gerl.config.blocks import SamplingConfig
from gerl.config.schema import key, main_key
from gerl.errors import ConfigError
from gerl.protocol import UpdateStats
from gerl.utils.seeding import derive_seed


@requires(trajectory=True, sampled_over="group")  # the update needs all neighbours in one rollout micro-batch
@dataclass(frozen=True)
class NeighborGRPOConfig(NormalisedConfig, ClippedConfig):
    """Keys of Neighbor GRPO."""

    timesteps: int | None = main_key(None, "noise levels trained per trainer step; null: all in the range", low=1)
    anchors: int = key(4, "images of a group that are trained, selected at random each step", low=1)
    temperature: float = key(1.0, "mean squared distance of latents at which a neighbour has weight 1/e", above=0)
    quasi_norm: float = key(
        0.8, "p of the norm that divides advantages: below 2, groups without clear winners count less", above=0, high=2
    )

    def check_sampling(self, sampling: SamplingConfig) -> None:
        if sampling.kernel != "ode" or sampling.solver != "euler":
            setting = f"kernel={sampling.kernel}" if sampling.kernel != "ode" else f"solver={sampling.solver}"
            raise ConfigError(
                f"sampling.{setting}: {self.name} compares Euler steps without noise, use kernel=ode with solver=euler"
            )
        if not sampling.same_init_noise or sampling.init_noise_spread == 0:
            raise ConfigError(
                f"sampling.init_noise_spread={sampling.init_noise_spread}: {self.name} compares images with "
                "similar initial noise; use same_init_noise=true with init_noise_spread=0.3"
            )


class NeighborGRPO(Algorithm):
    """Neighbor GRPO; the neighbours of an image are all images of its group, including itself."""

    names = "neighbor_grpo"
    settings: NeighborGRPOConfig

    def trained_steps(self, window: tuple[int, ...], step: int) -> tuple[int, ...]:
        steps = range(*self.config.sampling.steps_range)
        return sampled_steps(steps, self.settings.timesteps or len(steps), self.config.trainer.seed, step)

    def advantages(self, rewards: Rewards) -> torch.Tensor:
        return quasi_normed(super().advantages(rewards), rewards.group_ids, self.settings.quasi_norm)

    def kept_rows(self, batch: Batch) -> list[int]:
        """Return the rows of the anchors, in groups with a gradient."""
        credit, ids = batch.credit[:, list(batch.trained)], group_ids(batch.samples)
        anchors: list[int] = []
        for number in range(int(ids.max()) + 1):
            rows = (ids == number).nonzero().flatten()
            trained = not credit[rows].isnan().any()
            if trained and (self.kl_coef > 0 or bool((credit[rows] != 0).any())):
                first = batch.samples[int(rows[0])]
                seed = derive_seed("anchors", self.config.trainer.seed, first.step, repr(first.group))
                order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
                anchors += sorted(rows[order[: self.settings.anchors]].tolist())
        return anchors

    def train(
        self, policy: Policy, batch: Batch, rows: list[int], num_pairs: float, meter: StepGradients[Any] | None = None
    ) -> UpdateStats:
        settings, tape = self.settings, batch.tape
        options = self.replay_options(batch, rows, meter) | {"index": rows}
        base = self.base_steps(policy, tape, options) if self.kl_coef > 0 else {}
        ids, guided = group_ids(batch.samples), settings.cfg != "off"
        groups = [(ids == ids[row]).nonzero().flatten().tolist() for row in rows]
        measures: list[Measures] = []

        def on_step(k: int, step: ReplayedStep) -> torch.Tensor:
            latents, overwritten = tape.steps[k].x_next, tape.overwritten(k)
            bounds = settings.clip_range(latents[0].numel())
            credit = batch.credit[:, k].to(latents.device)
            # without guidance the recorded step is of another policy
            old = latents[rows] if guided else step.mean.detach()
            total = torch.zeros((), device=latents.device)
            for j, group in enumerate(groups):
                reached = ... if overwritten is None else ~overwritten[group].any(0)
                neighbours = torch.stack([latents[i][reached] for i in group])
                new, before = (log_policy(x[j][reached], neighbours, settings.temperature) for x in (step.mean, old))
                losses, metrics = clipped_policy_loss(new, before, credit[group], *bounds)
                deviation, loss = metrics.pop("ratio_deviation"), losses.mean()
                metrics["loss"] = loss.detach()
                if base:
                    kl = (((step.mean[j] - base[k].mean[j])[reached] / step.rule.jacobian) ** 2).mean()
                    loss = loss + self.kl_coef * self.weighted_kl(kl[None], batch, rows[j : j + 1])[0]
                    metrics |= {"kl": kl.detach(), "loss": loss.detach()}
                sums: Metrics = (
                    metrics if guided else {name: metrics[name] for name in ("loss", "kl") if name in metrics}
                )
                measures.append(Measures(1, sums, deviation=deviation if guided else None))
                # anchors represent the other images of their group
                total = total + loss * (len(group) / min(settings.anchors, len(group)))
            return total / num_pairs

        engine.replay(policy.pipe, tape, on_step, **options)
        return summed(measures)


def log_policy(x: torch.Tensor, neighbours: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return log pi of the module docstring, `[G]` fp32, given latents `x` `[...]` and `neighbours` `[G, ...]`."""
    distances = ((neighbours.detach().float() - x.float()) ** 2).flatten(1).mean(1)
    return (-distances / temperature).log_softmax(0)


def quasi_normed(advantages: torch.Tensor, groups: torch.Tensor, p: float) -> torch.Tensor:
    """Return `sqrt(G) A / (sum |A|^p)^(1/p)` within each group of G, `[B]`; 0 if all are 0 in the group."""
    result = torch.zeros_like(advantages)
    for number in groups.unique():
        members = groups == number
        values = advantages[members].double()
        highest = values.abs().max()
        if highest > 0:
            scaled = values / highest  # so that powers of p cannot overflow
            result[members] = (len(values) ** 0.5 * scaled / scaled.abs().pow(p).sum() ** (1 / p)).to(result.dtype)
    return result
