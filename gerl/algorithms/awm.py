"""AWM (arXiv 2509.25050): policy gradient with the flow-matching error as likelihood.

At a noise level t the log-likelihood of an image is -W(l, t) of its flow-matching error l = mean((v - target)^2); old
policy and trained weights see the same noise, so PPO's ratio is exp(W(l_old, t) - W(l, t)). On policy the gradient is
advantage-weighted flow matching, A dW/dl grad l: the objective of pretraining, with much less variance than scoring the
noise of a trajectory. `algorithm.weighting` is W:

    uniform l    t  t l    t2  t^2 l    huber  t (sqrt(l + e) - sqrt(e))    ghuber  t ((l + e)^p - e^p) / p,  p = 1/4
"""

import torch

from gerl.algorithms.core_algos import clipped_policy_loss
from gerl.algorithms.forward_process import ForwardProcess, Noised, per_sample

EPSILON = 1e-10
POWER = 0.25


class AWM(ForwardProcess):
    """Rows with advantage 0 are trained as well: their distances to the old policy and to the base model count."""

    uses_old = True
    needs_all_samples = True

    def loss(self, s: Noised) -> tuple[torch.Tensor, dict[str, float]]:
        """`clipped_surrogate` of the likelihoods; reports the shares clipped and the mean log-ratio."""
        assert s.old is not None
        algorithm, target = self.config.algorithm, s.target
        log_prob, old_log_prob = (
            log_likelihood(output, target, s.rule.sigma, algorithm.weighting) for output in (s.output, s.old)
        )
        bounds = s.advantages, algorithm.clip_low, algorithm.clip_high
        _, metrics = clipped_policy_loss(log_prob.detach(), old_log_prob, *bounds)
        # a largest deviation cannot be averaged over micro-batches
        reported = {name: value for name, value in metrics.items() if name != "ratio_deviation"}
        return clipped_surrogate(log_prob, old_log_prob, *bounds), reported


def log_likelihood(output: torch.Tensor, target: torch.Tensor, sigma: float, weighting: str) -> torch.Tensor:
    """`-W(l, sigma)` `[B]` of outputs `[B, ...]`; raises `ValueError` on an unknown `weighting`."""
    error = per_sample((output - target) ** 2)
    match weighting:
        case "uniform":
            return -error
        case "t":
            return -sigma * error
        case "t2":
            return -(sigma**2) * error
        case "huber":
            return -sigma * ((error + EPSILON).sqrt() - EPSILON**0.5)
        case "ghuber":
            return -sigma * ((error + EPSILON) ** POWER - EPSILON**POWER) / POWER
        case _:
            raise ValueError(f"weighting must be uniform, t, t2, huber or ghuber, got {weighting!r}")


def clipped_surrogate(
    log_prob: torch.Tensor, old_log_prob: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float
) -> torch.Tensor:
    """The rows `[B]` of which `core_algos.clipped_policy_loss` is the mean."""
    ratio = (log_prob - old_log_prob.detach()).clamp(-20, 20).exp()
    clipped = torch.where(advantages > 0, ratio > 1 + clip_high, ratio < 1 - clip_low)
    return -advantages * torch.where(clipped, ratio.clamp(1 - clip_low, 1 + clip_high), ratio)
