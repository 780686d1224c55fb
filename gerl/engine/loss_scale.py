"""Loss scaling for denoisers in fp16 (Micikevicius et al. 2018, arXiv 1710.03740, section 3.2).

The loss of one image among hundreds, averaged over tens of thousands of latents, gives cotangents below the least
number of fp16 (6e-8). So it is multiplied by a power of two, by which the gradient of the parameters, in fp32, is
divided again: both are exact. The largest cotangent of the model output then is between 1/2 and 1, which leaves 16
powers of two for those that grow on the way back, and 24 for those that shrink.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence

import torch


def loss_scale(loss: torch.Tensor, output: torch.Tensor) -> float:
    """The power of two by which the gradient of `output` (fp32), if multiplied, has its largest value in [1/2, 1)."""
    (gradient,) = torch.autograd.grad(loss, output, retain_graph=True, allow_unused=True)
    largest = 0.0 if gradient is None else float(gradient.abs().max())
    if not (math.isfinite(largest) and largest > 0):
        return 1.0
    return 2.0 ** min(-math.frexp(largest)[1], 126)


@contextlib.contextmanager
def unscaled(leaves: Sequence[torch.Tensor], scale: float) -> Iterator[None]:
    """A block whose backward passes add gradients to `leaves` that are divided by `scale`."""
    before = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    yield
    for leaf, gradient in zip(leaves, before, strict=True):
        if leaf.grad is not None:
            leaf.grad /= scale
        if gradient is not None:
            leaf.grad = gradient if leaf.grad is None else gradient.add_(leaf.grad)
