"""Functions of the user's that score tensors, so that rewards can be differentiated.

One whose attribute `takes_tensors` is true gets images `[B, 3, H, W]`, fp32 in [0, 1], and returns scores `[B]` as a
tensor; with `takes_frames` it gets videos as `[B, F, 3, H, W]`. Where only scores are needed, as in a validation, it
gets the finished pictures in the same form.
"""

from __future__ import annotations  # of torch, which the driver of a run may do without

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gerl.errors import RewardError
from gerl.rewards.scorers.base import ReturnError

if TYPE_CHECKING:
    import torch


def on_pictures(called: Callable[..., object], images: list[Any], prompts: list[str], metadata: list[Any]) -> object:
    """The scores by `called` of PIL images or lists of frames, which may be of several sizes: each one by itself."""
    import torch

    from gerl.rewards.scorers.on_tensors import tensors_of

    scores: list[float] = []
    for i, image in enumerate(images):
        pixels = tensors_of(image)[None] if isinstance(image, list) else tensors_of([image])
        with torch.no_grad():
            found = called(pixels, prompts[i : i + 1], metadata[i : i + 1])
        if not torch.is_tensor(found) or found.shape != (1,):
            what = f"a tensor of shape {list(found.shape)}" if torch.is_tensor(found) else f"{found!r:.80}"
            raise ReturnError(
                f"returned {what} for images {list(pixels.shape)}, expected a tensor with one score per image, [1]"
            )
        scores.append(float(found))
    return scores


def checked(found: object, images: torch.Tensor, place: str) -> torch.Tensor:
    """The scores `found` of `images`; raises `RewardError` unless they are a tensor `[B]` with a gradient."""
    import torch

    shape = list(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
    if not isinstance(found, torch.Tensor) or shape != [len(images)]:
        raise RewardError(
            f"a reward that takes tensors returned {shape} for images {list(images.shape)}: return a tensor with "
            f"one score per image, [{len(images)}]{place}"
        )
    if images.requires_grad and not found.requires_grad:
        raise RewardError(
            "a reward that takes tensors returned scores without gradient: compute them from the images with torch "
            f"functions, without no_grad, detach or numpy{place}"
        )
    return found
