"""CRD, centred reward distillation (arXiv 2603.14128): the policy as a reward model that has to agree with the reward.

A KL-regularised optimum satisfies b (r(x0) - E r) = A(x0) - E A within a prompt, where r is the implicit reward, the
log-ratio of the policy to the old one: the normalising constant, the same for all images of a prompt, cancels in the
centring. Estimated from forward-process errors it is

    r = -(mse(v) / w - mse(v_old) / w_old),    w = mean |v - target|, a constant: L1 weights, see `adaptive_error`
    L = clip / b * (b (r - mean_g r) - (A - mean_g A))^2,    A mapped from [-clip, clip] to [0, 1]

Unlike a policy gradient it has a fixed point: the loss is 0 if and only if the two centred rewards agree.
"""

import torch

from gerl.algorithms.diffusion_nft import adaptive_error, optimality
from gerl.algorithms.forward_process import ForwardProcess, Noised, group_mean
from gerl.config.algorithm import CRDConfig


class CRD(ForwardProcess):
    """Needs all rows of a group, those with advantage 0 as well: each has a part in the centring."""

    settings: CRDConfig
    guided_reference = True
    uses_old = True
    compared_with_old = ("implicit_reward",)
    needs_all_samples = True

    def loss(self, s: Noised) -> tuple[torch.Tensor, dict[str, float]]:
        """`crd_loss`; reports the mean `implicit_reward`, 0 where nothing was learnt since the old policy."""
        assert s.old is not None
        implicit = implicit_reward(s.output, s.old, s.target)
        losses = crd_loss(implicit, s.advantages, s.groups, self.settings.mix, self.settings.advantage_clip)
        return losses, {"implicit_reward": float(implicit.detach().mean())}


def implicit_reward(output: torch.Tensor, old: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """How much better than `old` an `output` fits `target` (all `[B, ...]`), in units of the error: `[B]`."""
    return adaptive_error(old.detach(), target) - adaptive_error(output, target)


def crd_loss(
    implicit: torch.Tensor, advantages: torch.Tensor, groups: torch.Tensor, mix: float, clip: float
) -> torch.Tensor:
    """The loss above, `[B]`, from implicit rewards, advantages and group numbers `[B]`; b is `mix`."""
    wanted = optimality(advantages, clip)
    excess = mix * (implicit - group_mean(implicit, groups)) - (wanted - group_mean(wanted, groups))
    return clip / mix * excess**2
