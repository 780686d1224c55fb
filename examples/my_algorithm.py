"""An algorithm of your own: Flow-GRPO whose ratio is bounded smoothly, not clipped (as in SAPO, arXiv 2511.20347).

gerl train algorithm.path=examples/my_algorithm.py algorithm.width=2e-4
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gerl.algorithms.flow_grpo import FlowGRPO, FlowGRPOConfig
from gerl.config.schema import key
from gerl.engine import ReplayedStep


@dataclass(frozen=True)
class SmoothConfig(FlowGRPOConfig):
    width: float = key(2e-4, "distance of the ratio from 1 at which its gradient has fallen to 0.42", above=0)


class Smooth(FlowGRPO):
    settings: SmoothConfig

    def policy_loss(
        self, step: ReplayedStep, advantages: torch.Tensor, proximal: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, dict[str, float]]:
        off, width = self.log_ratio(step).expm1(), self.settings.width
        losses = -advantages * width * (off / width).tanh()
        return losses, {"ratio_deviation": float(off.detach().abs().max())}
