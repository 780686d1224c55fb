"""CRD, centred reward distillation (arXiv 2603.14128): the policy's implicit reward is fitted to the reward.

A KL-regularised optimum satisfies b (r(x0) - E r) = A(x0) - E A within a prompt, where r is the implicit reward, the
log-ratio of the policy to the old one: the normalising constant, the same for all images of a prompt, cancels in the
centring. Estimated from forward-process errors it is

    r = -(mse(v) / w - mse(v_old) / w_old),    w = mean |v - target|, a constant: L1 weights, see `adaptive_error`
    L = clip / b * (b (r - mean_g r) - (A - mean_g A))^2,    A mapped from [-clip, clip] to [0, 1]

or, with `regression=cross_entropy`, the relative entropy of the probabilities that the two are the logits of,

    L = clip / b * KL(sigmoid(A - mean_g A) || sigmoid(b (r - mean_g r)))

which has the gradient of the cross-entropy, and is 0 where they agree. The gradients of the mean cancel within a group,
so it is a constant, which may come from a first pass over a group that is too large for one backward pass. Unlike a
policy gradient it has a fixed point: the loss is 0 if and only if the two centred rewards agree.
"""

from __future__ import annotations  # torch is imported lazily

from dataclasses import dataclass
from typing import Literal

from gerl.algorithms.common import requires
from gerl.algorithms.core_algos import Metrics
from gerl.algorithms.diffusion_nft import adaptive_error, optimality
from gerl.algorithms.forward_process import ContrastConfig, ForwardProcess, Noised, group_mean, pooled_mean
from gerl.algorithms.lazily import torch
from gerl.config.schema import key

LOWEST_KL = 1e-4  # KL weight of the worst image, with `kl_by_reward`


@requires(loss_over="group")
@dataclass(frozen=True)
class CRDConfig(ContrastConfig):
    """Keys of CRD."""

    regression: Literal["squared", "cross_entropy"] = key(
        "squared",
        "how the two centred rewards are matched: by their squared difference, or by the cross-entropy of the "
        "probabilities that they are the logits of",
    )
    kl_by_reward: bool = key(False, "weight of an image's KL by its quality: 1e-4 for the worst, kl_coef for the best")


class CRD(ForwardProcess):
    """Centred reward distillation; needs all rows of a group for the centring, also those with advantage 0."""

    names = "crd"
    settings: CRDConfig
    all_samples = True
    guided_reference = True
    compared_with_old = ("implicit_reward",)

    def loss(self, s: Noised) -> tuple[torch.Tensor, Metrics]:
        """Return `crd_loss`; reports the mean `implicit_reward`, which is 0 at the old policy."""
        implicit, settings = self._implicit(s), self.settings
        means = pooled_mean(s)
        losses = crd_loss(
            implicit, s.advantages, s.groups, settings.mix, settings.advantage_clip, means, settings.regression
        )
        return losses, {"implicit_reward": implicit.detach().mean()}

    def pooled(self, s: Noised) -> torch.Tensor:
        rewards = self.settings.mix * self._implicit(s), optimality(s.advantages, self.settings.advantage_clip)
        return torch.stack(rewards, 1).detach()

    def kl_weights(self, s: Noised) -> torch.Tensor | float:
        """Return r + (1 - r) LOWEST_KL / kl_coef with `kl_by_reward`; r: probability that an image is good."""
        if not self.settings.kl_by_reward:
            return 1.0
        lowest = min(1.0, LOWEST_KL / self.kl_coef) if self.kl_coef else 1.0
        return lowest + (1 - lowest) * optimality(s.advantages, self.settings.advantage_clip)

    def _implicit(self, s: Noised) -> torch.Tensor:
        assert s.old is not None
        rewards = implicit_reward(s.output, s.old, s.target)
        return rewards if s.scale is None else rewards / s.scale


def implicit_reward(output: torch.Tensor, old: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return how much better `output` fits `target` than `old` does, [B], in units of the error; inputs [B, ...]."""
    return adaptive_error(old.detach(), target) - adaptive_error(output, target)


def crd_loss(
    implicit: torch.Tensor,
    advantages: torch.Tensor,
    groups: torch.Tensor,
    mix: float,
    clip: float,
    means: torch.Tensor | None = None,
    regression: Literal["squared", "cross_entropy"] = "squared",
) -> torch.Tensor:
    """Return the losses above, [B], from implicit rewards, advantages and group ids [B]; b is `mix`.

    `means`: means of `b r` and of the advantages in [0, 1] over each row's group, [B, 2]; None: over the given rows.
    """
    scaled, wanted = mix * implicit, optimality(advantages, clip)
    if regression == "squared":
        excess = scaled - wanted
        mean = group_mean(excess.detach(), groups) if means is None else means[:, 0] - means[:, 1]
        return clip / mix * (excess - mean) ** 2
    if means is None:
        means = torch.stack([group_mean(scaled.detach(), groups), group_mean(wanted, groups)], 1)
    logits, wanted_logits = scaled - means[:, 0], wanted - means[:, 1]
    return clip / mix * relative_entropy(wanted_logits, logits)


def relative_entropy(wanted: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Return the KL [B] between Bernoulli distributions with logits `wanted` [B] and `logits` [B]."""
    probability = wanted.sigmoid()
    crossed, entropy = (
        torch.nn.functional.binary_cross_entropy_with_logits(x, probability, reduction="none") for x in (logits, wanted)
    )
    return crossed - entropy
