"""DGPO, direct group preference optimisation (arXiv 2510.08425): Diffusion-DPO with groups in place of pairs.

Each group prefers its images with positive advantage to those with negative ones, each to the extent of |A|. With the
denoising errors d = mean((v - target)^2) at noise shared by the group, Bradley-Terry gives

    -log sigmoid(-beta mean_i A_i (d_i - d_ref_i)),    whose gradient is beta w mean_i A_i grad d_i,
    w = sigmoid(beta mean_i A_i (d_i - d_ref_i))

and L = w A d with constant w has that gradient without the factor beta: the error of good images goes down, that of bad
ones up, and the less the group's order is already learnt, the more (w = 1/2 at the base model, the reference). As in
PPO, a row whose ratio exp(d_old - d) has left the clip range in the direction of its advantage stops.
"""

import torch

from gerl.algorithms.forward_process import ForwardProcess, Noised, group_mean, per_sample
from gerl.config import Config
from gerl.config.algorithm import DGPOConfig


class DGPO(ForwardProcess):
    """The preferences are those against the base model; the old policy bounds the step."""

    settings: DGPOConfig
    uses_old = True
    compared_with_old = ("stopped_fraction",)
    uses_reference = True
    shared_noise = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.needs_all_samples = self.settings.kl_coef > 0  # a sample without advantage still has a distance

    def loss(self, s: Noised) -> tuple[torch.Tensor, dict[str, float]]:
        """`dgpo_loss`; reports the mean `group_weight` w and the `stopped_fraction` of rows."""
        assert s.old is not None and s.reference is not None
        target = s.target
        error, old, reference = (per_sample((output - target) ** 2) for output in (s.output, s.old, s.reference))
        weight = group_weight(error, reference, s.advantages, s.groups, self.settings.beta)
        stop = stopped(error, old, s.advantages, *self.settings.clip_range)
        means = torch.stack([weight.mean(), stop.to(weight.dtype).mean()]).tolist()  # one device synchronisation
        losses = dgpo_loss(error, s.advantages, weight, stop)
        return losses, {"group_weight": means[0], "stopped_fraction": means[1]}


def dgpo_loss(error: torch.Tensor, advantages: torch.Tensor, weight: torch.Tensor, stop: torch.Tensor) -> torch.Tensor:
    """`w A d`, `[B]`, from `[B]` each; without gradient where `stop`."""
    return weight * advantages * torch.where(stop, error.detach(), error)


def group_weight(
    error: torch.Tensor, reference: torch.Tensor, advantages: torch.Tensor, groups: torch.Tensor, beta: float
) -> torch.Tensor:
    """w of each row's group, `[B]` in (0, 1), a constant; the mean is over the rows of the group that are present."""
    return group_mean(advantages * beta * (error - reference), groups).detach().sigmoid()


def stopped(
    error: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float
) -> torch.Tensor:
    """Whether a row has moved far enough: `[B]` bool from errors `[B]` of trained weights and old policy."""
    ratio = (old - error).detach().clamp(-20, 20).exp()
    return torch.where(advantages > 0, ratio > 1 + clip_high, (advantages < 0) & (ratio < 1 - clip_low))
