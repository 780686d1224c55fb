"""DiffusionNFT (arXiv 2509.16117): forward-process contrast of images with good and bad rewards.

Two implicit policies lie on either side of the old one, v+ = (1 - b) v_old + b v and v- = (1 + b) v_old - b v. With
probability r = clamp(A / (2 clip) + 1/2, 0, 1) an image is good and v+ must predict it, otherwise v- must:

    L = clip / b * (r |x0+ - x0|^2 / w+  +  (1 - r) |x0- - x0|^2 / w-),    w+- = mean |x0+- - x0|, a constant

Without the weights w+-, the optimum is v_old + (2 / b) E[r (v - v_old) | x_s], where v_old = E[v | x_s]: an improved
policy without likelihoods, guidance or a particular solver. At v = v_old the gradient is (2 r - 1) clip times the
gradient of weighted flow matching, independent of b.
"""

from __future__ import annotations  # torch is imported lazily

from collections.abc import Callable
from dataclasses import dataclass

from gerl.algorithms.common import per_sample
from gerl.algorithms.core_algos import Metrics
from gerl.algorithms.forward_process import ContrastConfig, ForwardProcess, Noised
from gerl.algorithms.lazily import torch

SMALLEST_WEIGHT = 1e-5


@dataclass(frozen=True)
class DiffusionNFTConfig(ContrastConfig):
    """Keys of DiffusionNFT."""


class DiffusionNFT(ForwardProcess):
    """DiffusionNFT; samples with advantage 0 are trained too, since their loss pulls towards the old policy."""

    names = "diffusion_nft"
    settings: DiffusionNFTConfig
    all_samples = True
    compared_with_old = ("old_distance",)

    def loss(self, s: Noised) -> tuple[torch.Tensor, Metrics]:
        """Return `nft_loss` and the metric `old_distance`, the mean squared distance to the old policy's outputs."""
        assert s.old is not None
        mix, clip = self.settings.mix, self.settings.advantage_clip
        losses = nft_loss(lambda output: s.rule.clean(s.x, output), s.x0, s.output, s.old, s.advantages, mix, clip)
        if s.scale is not None:
            losses = losses / s.scale  # as large as the errors, unlike a mean of squares
        return losses, {"old_distance": ((s.output.detach() - s.old) ** 2).mean()}


def nft_loss(
    clean: Callable[[torch.Tensor], torch.Tensor],
    x0: torch.Tensor,
    output: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    mix: float,
    clip: float,
) -> torch.Tensor:
    """Return the loss L `[B]` defined in the module docstring; `mix`: b; `clean` converts an output [B, ...] to x0.

    `clean` is affine (unless the scheduler clips x0), so that mixing outputs is mixing clean latents.
    """
    positive, negative = implicit_policies(output, old, mix)
    good = optimality(advantages, clip)
    losses = good * adaptive_error(clean(positive), x0) + (1 - good) * adaptive_error(clean(negative), x0)
    return clip / mix * losses


def implicit_policies(output: torch.Tensor, old: torch.Tensor, mix: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs of the positive and negative policy, `[B, ...]` each; `old` gets no gradient."""
    old = old.detach()
    return (1 - mix) * old + mix * output, (1 + mix) * old - mix * output


def optimality(advantages: torch.Tensor, clip: float) -> torch.Tensor:
    """Map advantages `[B]` to probabilities of being good: at most -`clip` to 0, 0 to 1/2, at least `clip` to 1."""
    return (advantages / (2 * clip) + 0.5).clamp(0, 1)


def adaptive_error(prediction: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """Return the squared error over the detached absolute error, [B], so that hard noise levels do not dominate."""
    error = prediction - data
    weight = per_sample(error.detach().double().abs()).clamp(min=SMALLEST_WEIGHT)
    return per_sample(error**2) / weight.to(error.dtype)
