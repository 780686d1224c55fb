"""DiffusionNFT (arXiv 2509.16117): a forward-process contrast of what the reward calls good and bad.

Two implicit policies lie on either side of the old one, v+ = (1 - b) v_old + b v and v- = (1 + b) v_old - b v. With the
probability r = clamp(A / (2 clip) + 1/2, 0, 1) that an image is good, v+ has to predict it, else v- has to:

    L = clip / b * (r |x0+ - x0|^2 / w+  +  (1 - r) |x0- - x0|^2 / w-),    w+- = mean |x0+- - x0|, a constant

Unweighted, the optimum is v_old + (2 / b) E[r (v - v_old) | x_s], where v_old = E[v | x_s]: a better policy without
likelihoods, guidance or a particular solver. At v = v_old the gradient is (2 r - 1) clip times that of weighted flow
matching, whatever b is.
"""

from __future__ import annotations  # of torch, see `lazy`

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gerl.algorithms.forward_process import ContrastConfig, ForwardProcess, Noised, per_sample
from gerl.utils.lazy import lazy

if TYPE_CHECKING:
    import torch
else:
    torch = lazy("torch")

SMALLEST_WEIGHT = 1e-5


@dataclass(frozen=True)
class DiffusionNFTConfig(ContrastConfig):
    """The keys of DiffusionNFT."""


class DiffusionNFT(ForwardProcess):
    """Rows with advantage 0 are trained as well: their loss pulls back towards the old policy."""

    names = "diffusion_nft"
    settings: DiffusionNFTConfig
    compared_with_old = ("old_distance",)

    @property
    def needs_all_samples(self) -> bool:
        return True

    def loss(self, s: Noised) -> tuple[torch.Tensor, dict[str, float]]:
        """`nft_loss`; reports `old_distance`, the mean squared distance of the outputs to the old policy's."""
        assert s.old is not None
        mix, clip = self.settings.mix, self.settings.advantage_clip
        losses = nft_loss(lambda output: s.rule.clean(s.x, output), s.x0, s.output, s.old, s.advantages, mix, clip)
        return losses, {"old_distance": float(((s.output.detach() - s.old) ** 2).mean())}


def nft_loss(
    clean: Callable[[torch.Tensor], torch.Tensor],
    x0: torch.Tensor,
    output: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    mix: float,
    clip: float,
) -> torch.Tensor:
    """The loss above, `[B]`: `x0`, `output` and `old` `[B, ...]`, `advantages` `[B]`, b is `mix`.

    The policies are mixed as model outputs; `clean` turns such an output into x0. It is affine (unless the scheduler
    clips x0), so that the mixture is the same for velocity, epsilon and v prediction.
    """
    positive, negative = implicit_policies(output, old, mix)
    good = optimality(advantages, clip)
    losses = good * adaptive_error(clean(positive), x0) + (1 - good) * adaptive_error(clean(negative), x0)
    return clip / mix * losses


def implicit_policies(output: torch.Tensor, old: torch.Tensor, mix: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs of the positive and the negative policy, `[B, ...]` each; no gradient flows into `old`."""
    old = old.detach()
    return (1 - mix) * old + mix * output, (1 + mix) * old - mix * output


def optimality(advantages: torch.Tensor, clip: float) -> torch.Tensor:
    """Advantages `[B]` as probabilities of being good: -`clip` and below is 0, 0 is 1/2, `clip` and above is 1."""
    return (advantages / (2 * clip) + 0.5).clamp(0, 1)


def adaptive_error(prediction: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """Mean squared error over the mean absolute error, a constant: `[B]`; its gradient is as large at any scale.

    Without the weight, noise levels at which the data can hardly be told would dominate.
    """
    error = prediction - data
    weight = per_sample(error.detach().double().abs()).clamp(min=SMALLEST_WEIGHT)
    return per_sample(error**2) / weight.to(error.dtype)
