"""Pictures as tensors are those of image libraries."""

import numpy as np
import torch
from PIL import Image
from tiny_clip import pictures

from gerl.utils.tensors import tensors_of
from reward_models.scorers.networks import (
    longer_side,
    resized,
    shorter_side,
)


def test_resizing_is_that_of_pil_but_for_rounding() -> None:
    for image in pictures(2):
        for size in ((16, 24), (96, 80)):
            expected = tensors_of([image.resize(size, Image.Resampling.BICUBIC)])
            found = resized(tensors_of([image]), size[1], size[0])
            assert (found - expected).abs().max() < 2.5 / 255 and (found - expected).abs().mean() < 0.5 / 255


def test_sides_keep_their_proportion() -> None:
    wide = tensors_of([pictures(2)[1]])  # 64 x 40
    assert shorter_side(wide, 32).shape == (1, 3, 32, 51)
    whole = longer_side(wide, 32)
    assert whole.shape == (1, 3, 32, 32) and whole[:, :, :6].abs().max() == whole[:, :, -6:].abs().max() == 0


def test_tensors_have_the_values_of_the_bytes_and_a_gradient() -> None:
    image = Image.fromarray(np.arange(4 * 3 * 3, dtype=np.uint8).reshape(4, 3, 3))
    tensors = tensors_of([image, image])
    assert tensors.shape == (2, 3, 4, 3) and tensors[1, 2, 3, 2] == torch.tensor(35.0) / 255
    tensors.requires_grad_()
    longer_side(shorter_side(tensors, 8), 5).sum().backward()
    assert tensors.grad is not None and tensors.grad.abs().min() > 0
