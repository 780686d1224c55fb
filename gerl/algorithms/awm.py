"""AWM (arXiv 2509.25050): policy gradient with the flow-matching error as likelihood.

At a noise level t the log-likelihood of an image is -W(l, t) of its flow-matching error l = mean((v - target)^2); old
policy and trained weights see the same noise, so PPO's ratio is exp(W(l_old, t) - W(l, t)). On policy the gradient is
advantage-weighted flow matching, A dW/dl grad l: the objective of pretraining, with much less variance than scoring the
noise of a trajectory. `algorithm.weighting` is W:

    uniform l    t  t l    t2  t^2 l    huber  t (sqrt(l + e) - sqrt(e))    ghuber  t ((l + e)^p - e^p) / p,  p = 1/4
"""

from __future__ import annotations  # torch is imported lazily

from dataclasses import dataclass, replace

from gerl.algorithms.base import ClippedConfig, DownSampledConfig
from gerl.algorithms.common import per_sample
from gerl.algorithms.core_algos import Metrics, clipped_policy_loss
from gerl.algorithms.forward_process import ForwardProcess, ForwardProcessConfig, Noised
from gerl.algorithms.lazily import torch
from gerl.config import Config
from gerl.config.algorithms import Needs
from gerl.config.blocks import LikelihoodWeighting
from gerl.config.exclusions import Exclusion
from gerl.config.schema import key

EPSILON = 1e-10
POWER = 0.25


@dataclass(frozen=True)
class AWMConfig(ForwardProcessConfig, DownSampledConfig, ClippedConfig):
    """Keys of AWM."""

    weighting: LikelihoodWeighting = key("uniform", "likelihood weight of a noise level")
    off_policy: bool = key(True, "the ratio is to the old policy; false: to the trained weights, so 1, never clipped")
    shared_noise: bool = key(
        False,
        "the images of a group get the same noise at each level: their common part then cancels in the gradient, "
        "since their advantages sum to 0",
    )

    excludes = (
        *ForwardProcessConfig.excludes,
        Exclusion("actor.updates>1", "algorithm.off_policy=false", "with algorithm.off_policy=false the ratio is 1 "
                  "even in later updates, which are off-policy", "use 1, or off_policy=true"),
    )  # fmt: skip

    @property
    def needs(self) -> Needs:
        return replace(super().needs, old_decay=self.old_decay)


class AWM(ForwardProcess):
    """Advantage-weighted matching; rows with advantage 0 are trained if a distance to another policy counts."""

    names = "awm"
    settings: AWMConfig
    compared_with_old = ("clip_fraction_low", "clip_fraction_high", "log_ratio_mean")

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.shared_noise = self.settings.shared_noise
        if not self.settings.off_policy:  # the old policy is kept, but called only if its distance counts
            self.needs_old = self.settings.old_kl_coef > 0

    @property
    def needs_all_samples(self) -> bool:
        return self.kl_coef > 0 or self.settings.old_kl_coef > 0 or self.settings.norm_coef > 0

    def loss(self, s: Noised) -> tuple[torch.Tensor, Metrics]:
        """Return `clipped_policy_loss` of the likelihoods; reports clip fractions and the mean log-ratio."""
        target, weighting, bounds = s.target, self.settings.weighting, self.settings.clip_range(s.x[0].numel())
        log_prob = log_likelihood(s.output, target, s.rule.sigma, weighting)
        if not self.settings.off_policy:
            return clipped_policy_loss(log_prob, log_prob, s.advantages, *bounds)[0], {}
        assert s.old is not None
        old = log_likelihood(s.old, target, s.rule.sigma, weighting)
        losses, metrics = clipped_policy_loss(log_prob, old, s.advantages, *bounds)
        del metrics["ratio_deviation"]  # a maximum cannot be averaged over micro-batches
        return losses, metrics


def log_likelihood(output: torch.Tensor, target: torch.Tensor, sigma: float, kind: LikelihoodWeighting) -> torch.Tensor:
    """Return `-W(l, sigma)` [B] of outputs [B, ...]."""
    error = per_sample((output - target) ** 2)
    powers = {"uniform": 0, "t": 1, "t2": 2}
    if kind in powers:
        return -(sigma ** powers[kind]) * error
    if kind == "huber":
        return -sigma * ((error + EPSILON).sqrt() - EPSILON**0.5)
    return -sigma * ((error + EPSILON) ** POWER - EPSILON**POWER) / POWER
