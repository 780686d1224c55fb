"""What every scorer that is differentiated has to do."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from PIL import Image

from gerl.utils.tensors import tensors_of


def assert_differentiable(
    scorer: Any, images: Sequence[Image.Image], prompts: Sequence[str], tolerance: float = 0.02
) -> None:
    """Scores of tensors are those of pictures, and have the gradient of finite differences; no weight gets one.

    `tolerance`: of a score where image processors round to bytes, as they do where they resize, to 32.
    """
    assert scorer.differentiable
    images = [image.point(lambda value: 64 + value // 2) for image in images]  # no pixel is at the bounds
    images += [images[0].resize((32, 32)), images[1].resize((51, 32))]  # are only cropped
    for image, prompt in zip(images, [*prompts, *prompts[:2]], strict=True):
        pixels = tensors_of([image]).requires_grad_()
        score = scorer.tensor_scores(pixels, [prompt], [{}])
        assert score.shape == (1,) and score.dtype == torch.float32
        near = 2e-5 if min(image.size) == 32 else tolerance
        assert float(score.detach()) == pytest.approx(scorer([image], [prompt], [{}])[0], rel=near, abs=near)
        (gradient,) = torch.autograd.grad(score.sum(), pixels)
        direction = torch.randn(pixels.shape, generator=torch.Generator().manual_seed(0))

        def at(size: float, pixels: Any = pixels, direction: Any = direction, prompt: str = prompt) -> float:
            with torch.no_grad():
                return float(scorer.tensor_scores(pixels + size * direction, [prompt], [{}]).double())

        slopes = [(at(size) - at(-size)) / (2 * size) for size in (1e-3, 2e-3)]
        measured = (4 * slopes[0] - slopes[1]) / 3
        exact = float((gradient * direction).sum())
        assert exact == pytest.approx(measured, rel=0.05, abs=2e-4) and gradient.abs().max() > 0
    same_size = [image for image in images if image.size == images[0].size]
    together = scorer.tensor_scores(tensors_of(same_size), list(prompts[: len(same_size)]), [{}] * len(same_size))
    alone = [scorer.tensor_scores(tensors_of([i]), [p], [{}]) for i, p in zip(same_size, prompts, strict=False)]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-4, atol=1e-4)
