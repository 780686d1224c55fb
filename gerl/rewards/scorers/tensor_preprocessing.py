"""Pictures as tensors, for scorers that are differentiated: what image processors do to PIL images, with gradients.

Resizing is bicubic with antialiasing, as PIL's, but for its rounding to bytes.
"""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

Channels: TypeAlias = Sequence[float] | np.ndarray  # a number for each


def resized(images: torch.Tensor, height: int, width: int, clamp: bool = True) -> torch.Tensor:
    """Images `[B, 3, H, W]` in [0, 1] as `[B, 3, height, width]`; `clamp`: where bicubic weights go beyond, as PIL."""
    if images.shape[2:] == (height, width):
        return images
    found = F.interpolate(images, (height, width), mode="bicubic", antialias=True)
    return found.clamp(0, 1) if clamp else found


def shorter_side(images: torch.Tensor, size: int) -> torch.Tensor:
    """Images `[B, 3, H, W]` whose shorter side is resized to `size`, the longer one in proportion, rounded down."""
    short = min(images.shape[2:])
    height, width = (int(size * side / short) for side in images.shape[2:])
    return resized(images, height, width)


def longer_side(images: torch.Tensor, size: int) -> torch.Tensor:
    """Images `[B, 3, size, size]`: the longer side resized to `size`, black beside the shorter one."""
    height, width = (max(1, round(side * size / max(images.shape[2:]))) for side in images.shape[2:])
    images = resized(images, height, width, clamp=False)
    top, left = (size - height) // 2, (size - width) // 2
    return F.pad(images, (left, size - width - left, top, size - height - top))


def normalised(images: torch.Tensor, mean: Channels, std: Channels) -> torch.Tensor:
    """Images `[B, 3, H, W]`, each channel less its mean and divided by its std."""
    shift, scale = (torch.as_tensor(np.asarray(v)).to(images)[:, None, None] for v in (mean, std))
    return (images - shift) / scale


def tensors_of(images: Sequence[Image.Image]) -> torch.Tensor:
    """PIL images of one size as `[B, 3, H, W]` fp32 in [0, 1]."""
    pixels = [torch.from_numpy(np.array(image.convert("RGB"))) for image in images]
    return torch.stack(pixels).permute(0, 3, 1, 2).float() / 255
