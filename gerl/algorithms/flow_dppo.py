"""Flow-DPPO: a trust region by divergence rather than by ratio.

The Gaussian steps of a flow have a KL in closed form, ||mu - mu_old||^2 / (2 std^2). A sample whose KL to the rollout's
policy has reached `kl_threshold` stops learning in the direction that leads further away; below it nothing is clipped,
so that a single unlikely noise draw does not stop a step that has hardly moved.
"""

import torch

from gerl.algorithms.core_algos import gaussian_kl, masked_policy_loss, ratio_spread
from gerl.algorithms.flow_grpo import FlowGRPO
from gerl.config.policy_gradients import FlowDPPOConfig
from gerl.engine import ReplayedStep


class FlowDPPO(FlowGRPO):
    """Flow-GRPO with the divergence mask in place of the clip."""

    settings: FlowDPPOConfig
    scores_means = True

    def policy_loss(
        self, step: ReplayedStep, advantages: torch.Tensor, proximal: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, dict[str, float]]:
        assert proximal is None, "it clips nothing"
        log_ratio = self.log_ratio(step)
        old_mean = step.mean.detach() if self.settings.cfg == "off" else step.recorded_mean
        assert old_mean is not None
        kl, threshold = gaussian_kl(step.mean.detach(), old_mean, step.std), self.settings.kl_threshold
        losses, metrics = masked_policy_loss(log_ratio, torch.zeros_like(log_ratio), advantages, kl, threshold)
        return losses, metrics | ratio_spread(log_ratio, kl >= threshold)
