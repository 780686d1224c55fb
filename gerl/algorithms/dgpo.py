"""DGPO, direct group preference optimisation (arXiv 2510.08425): Diffusion-DPO with groups instead of pairs.

Each group prefers its images with positive advantage to those with negative ones, each to the extent of |A|. With the
denoising errors d = mean((v - target)^2) at noise shared by the group, Bradley-Terry gives

    -log sigmoid(-beta mean_i A_i (d_i - d_ref_i)),    whose gradient is beta w mean_i A_i grad d_i,
    w = sigmoid(beta mean_i A_i (d_i - d_ref_i))

and L = w A d with constant w has that gradient without the factor beta: the error of good images goes down, that of bad
ones up, and the less the group's order is already learnt, the more (w = 1/2 at the reference: the base model or, as in
TDM-R1, arXiv 2603.07700, the old policy). As in PPO, a row whose ratio exp(d_old - d) has left the clip range in the
direction of its advantage stops.
"""

from __future__ import annotations  # torch is imported lazily

from dataclasses import dataclass, replace
from typing import Literal

from gerl.algorithms.base import ClippedConfig, ShapedConfig
from gerl.algorithms.common import per_sample
from gerl.algorithms.core_algos import Metrics
from gerl.algorithms.forward_process import ForwardProcess, Noised, PreferenceConfig, group_mean, pooled_mean
from gerl.algorithms.lazily import torch
from gerl.config import Config
from gerl.config.algorithms import Needs
from gerl.config.schema import key
from gerl.errors import ConfigError


@dataclass(frozen=True)
class DGPOConfig(PreferenceConfig, ShapedConfig, ClippedConfig):
    """Keys of DGPO."""

    reference: Literal["base", "old"] = key("base", "reference of the preferences: base model or old policy")
    rollout_old_after: int | None = key(
        None,
        "trainer steps after which the old policy samples the rollouts; null: the trained weights always do",
        low=0,
    )

    @property
    def needs(self) -> Needs:
        needs, old_after = super().needs, self.rollout_old_after
        base = needs.base_model or self.reference == "base"
        return replace(needs, base_model=base, old_decay=self.old_decay, rollout_old_after=old_after)

    def check(self) -> None:
        super().check()
        if self.rollout_old_after is not None and self.rollout_decay is not None:
            raise ConfigError(
                f"algorithm.rollout_old_after={self.rollout_old_after}: with algorithm.rollout_decay separate "
                "weights sample the rollouts; use one of them"
            )
        if self.reference == "old" and self.reference_guidance is not None and self.kl_coef == 0:
            raise ConfigError(
                "algorithm.reference_guidance: with reference=old and kl_coef=0 the base model is not run; remove it"
            )


class DGPO(ForwardProcess):
    """Group preferences relative to the base model or the old policy; the latter also bounds the step."""

    names = "dgpo"
    settings: DGPOConfig
    kl_on_all = True
    compared_with_old: tuple[str, ...] = ("stopped_fraction",)
    shared_noise = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if self.settings.reference == "old":  # then w is 1/2 while the old policy equals the trained one
            self.compared_with_old += ("group_weight",)

    def loss(self, s: Noised) -> tuple[torch.Tensor, Metrics]:
        """Return `dgpo_loss`; reports the mean `group_weight` w and the `stopped_fraction` of rows."""
        error, old, reference = self._errors(s)
        weight = group_weight(error, reference, s.advantages, s.groups, self.settings.beta, pooled_mean(s))
        stop = stopped(error, old, s.advantages, *self.settings.clip_range(s.x[0].numel()))
        losses = dgpo_loss(error, s.advantages, weight, stop)
        return losses, {"group_weight": weight.mean(), "stopped_fraction": stop.to(weight.dtype).mean()}

    def pooled(self, s: Noised) -> torch.Tensor:
        error, _, reference = self._errors(s)
        return row_preference(error, reference, s.advantages, self.settings.beta)

    def _errors(self, s: Noised) -> list[torch.Tensor]:
        """Return the errors [B] of the trained weights, the old policy and the reference."""
        reference, target = s.reference if self.settings.reference == "base" else s.old, s.target
        assert s.old is not None and reference is not None
        return [per_sample((output - target) ** 2) for output in (s.output, s.old, reference)]


def dgpo_loss(error: torch.Tensor, advantages: torch.Tensor, weight: torch.Tensor, stop: torch.Tensor) -> torch.Tensor:
    """Return `w A d` [B], from [B] each; without gradient if `stop`."""
    return weight * advantages * torch.where(stop, error.detach(), error)


def group_weight(
    error: torch.Tensor,
    reference: torch.Tensor,
    advantages: torch.Tensor,
    groups: torch.Tensor,
    beta: float,
    mean: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return w of each row's group [B], without gradient; `mean` [B]: of the whole group's `row_preference`."""
    if mean is None:
        mean = group_mean(row_preference(error, reference, advantages, beta), groups)
    return mean.sigmoid()


def row_preference(error: torch.Tensor, reference: torch.Tensor, advantages: torch.Tensor, beta: float) -> torch.Tensor:
    """Return `A beta (d - d_ref)` [B], without gradient: a row's remaining error in the order of its group."""
    return (advantages * beta * (error - reference)).detach()


def stopped(
    error: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float
) -> torch.Tensor:
    """Whether a row has left the clip range, [B] bool, from errors [B] of trained weights and old policy."""
    ratio = (old - error).detach().clamp(-20, 20).exp()
    return torch.where(advantages > 0, ratio > 1 + clip_high, (advantages < 0) & (ratio < 1 - clip_low))
