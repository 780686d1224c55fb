"""Diffusion-DPO (arXiv 2311.12908): the best image of each group against its worst.

The policy should fit the winner better and the loser worse than the reference does, at the same noise eps and level:

    L = -log sigmoid(-beta / 2 * ((mse_w - mse_w_ref) - (mse_l - mse_l_ref))),    mse = mean((v - target)^2)

Online the pairs are sampled from the current policy, and the reference is the old policy, updated periodically; as
published the pairs are those of a file (data.train_on=files), and the reference is the base model (reference=base).
At the reference the loss is ln 2 and its derivatives by mse_w and mse_l are beta / 4 and -beta / 4.
"""

from __future__ import annotations  # torch is imported lazily

from dataclasses import dataclass, replace
from typing import Literal

from gerl.algorithms.base import Rewards
from gerl.algorithms.common import per_sample
from gerl.algorithms.core_algos import Metrics, preference_pairs
from gerl.algorithms.forward_process import ForwardProcess, Noised, PreferenceConfig
from gerl.algorithms.lazily import torch
from gerl.config import Config
from gerl.config.algorithms import Needs
from gerl.config.schema import key


@dataclass(frozen=True)
class DiffusionDPOConfig(PreferenceConfig):
    """The keys of DiffusionDPO."""

    reference: Literal["old", "base"] = key(
        "old", "reference of the preferences: the old policy, updated periodically, or the base model"
    )

    @property
    def needs(self) -> Needs:
        needs, base = super().needs, self.reference == "base"
        old = needs.old_decay if base else self.old_decay
        # a pair: the best and the worst
        return replace(needs, loss_over="pair", base_model=needs.base_model or base, old_decay=old)


class DiffusionDPO(ForwardProcess):
    """Credit +1 for the best of a group, -1 for the worst, and 0 for the others, which are not trained on."""

    names = "diffusion_dpo"
    settings: DiffusionDPOConfig
    shared_noise = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.from_old = self.settings.reference == "old"
        self.compared_with_old = ("preference_margin",) if self.from_old else ()

    def advantages(self, rewards: Rewards) -> torch.Tensor:
        return preference_pairs(rewards.totals, rewards.group_ids)

    def loss(self, s: Noised) -> tuple[torch.Tensor, Metrics]:
        """Return `dpo_loss`; reports the mean `preference_margin` relative to the reference."""
        excess, beta = self._excess(s), self.settings.beta
        if s.pooled is None:
            pairs = paired(s.advantages, s.groups)
            margin = torch.where(pairs, preference_margin(excess, s.advantages, s.groups), 0.0)
            losses = dpo_loss(margin, pairs, beta)
        else:
            sums, counts = s.pooled
            pairs, signed = counts == 2, s.advantages.sign() * excess
            margin = torch.where(pairs, signed.detach() - signed - sums, 0.0)
            # the other row is in another micro-batch: take the whole gradient of this row and half of the value
            whole = 2 * dpo_loss(margin, pairs, beta)
            losses = whole - whole.detach() / 2
        return losses, {"preference_margin": margin.detach().mean()}

    def pooled(self, s: Noised) -> torch.Tensor:
        """Return the excess of the winner, minus that of the loser; their sum is minus the margin."""
        return s.advantages.sign() * self._excess(s).detach()

    def _excess(self, s: Noised) -> torch.Tensor:
        reference, target = s.old if self.from_old else s.reference, s.target
        assert reference is not None
        return per_sample((s.output - target) ** 2) - per_sample((reference - target) ** 2)


def dpo_loss(margin: torch.Tensor, pairs: torch.Tensor, beta: float) -> torch.Tensor:
    """Return half the loss of its pair for each row [B], so that rows sum to pairs; 0 for rows outside `pairs`."""
    return torch.where(pairs, -torch.nn.functional.logsigmoid(beta / 2 * margin) / 2, 0.0)


def preference_margin(excess: torch.Tensor, preferences: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Return the `excess` of the loser minus that of the winner for each row of a pair, [B]."""
    same = groups[:, None] == groups
    return -torch.where(same, preferences.sign() * excess, 0.0).sum(1)


def paired(preferences: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Return which rows are winner or loser of a group with both, [B] bool."""
    opposite = preferences.sign()[:, None] * preferences.sign() < 0
    return (opposite & (groups[:, None] == groups)).any(1)
