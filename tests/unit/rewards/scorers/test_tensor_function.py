"""A user's function of tensors: differentiated, and called on pictures for the values alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from gerl.config import ScorerConfig
from gerl.errors import RewardError
from gerl.objects import PREFIX, offered
from gerl.rewards.scorers import build_scorer

FILE = """
import torch

def compute_score(images, prompts, metadata, power=1):
    assert images.dtype == torch.float32 and 0 <= images.min() and images.max() <= 1
    return images.flatten(1).mean(1) ** power

compute_score.takes_tensors = True
"""
PICTURES = [Image.fromarray(np.full((size, 6, 3), value, np.uint8)) for size, value in ((4, 51), (8, 102))]


def test_a_function_of_a_file_gets_tensors_either_way(tmp_path: Path) -> None:
    (tmp_path / "bright.py").write_text(FILE)
    scorer = build_scorer("bright", ScorerConfig(path=str(tmp_path / "bright.py"), kwargs={"power": 2}))
    assert scorer.differentiable
    assert scorer(PICTURES, ["a", "b"], [{}, {}]) == pytest.approx([0.04, 0.16])  # of two sizes
    images = torch.full((2, 3, 4, 4), 0.5, requires_grad=True)
    scores = scorer.tensor_scores(images, ["a", "b"], [{}, {}])
    scores.sum().backward()
    assert scores.tolist() == [0.25, 0.25]
    assert images.grad is not None and torch.allclose(images.grad, torch.full_like(images, 2 * 0.5 / 48))


def test_videos_are_a_tensor_of_frames_where_it_takes_them() -> None:
    def slow(videos: torch.Tensor) -> torch.Tensor:
        return -(videos[:, 1:] - videos[:, :-1]).abs().flatten(1).mean(1)

    slow.takes_tensors = slow.takes_frames = True  # type: ignore[attr-defined]
    with offered({"slow": slow}, {}):
        scorer = build_scorer("slow", ScorerConfig(path=PREFIX + "slow"))
    frames = [PICTURES[0], Image.fromarray(255 - np.asarray(PICTURES[0])), PICTURES[0]]
    assert scorer([frames], ["a"], [{}]) == pytest.approx([-0.6])  # type: ignore[list-item]
    assert scorer.tensor_scores(torch.zeros(2, 3, 3, 4, 4), ["a"] * 2, [{}] * 2).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda images: images.detach().flatten(1).mean(1), "returned scores without gradient"),
        (lambda images: images.mean(), r"returned \[\] for images \[2, 3, 4, 4\]: return a tensor"),
        (lambda images: [0.0, 1.0], "returned list for images"),
    ],
)
def test_what_cannot_be_differentiated_is_named_with_its_place(returned: Callable[..., Any], message: str) -> None:
    def given(images: torch.Tensor) -> object:
        return returned(images)

    given.takes_tensors = True  # type: ignore[attr-defined]
    with offered({"f": given}, {}):
        scorer = build_scorer("f", ScorerConfig(path=PREFIX + "f"))
    with pytest.raises(RewardError, match=rf"a reward that takes tensors {message}.*\(.*line \d+: given\)"):
        scorer.tensor_scores(torch.rand(2, 3, 4, 4, requires_grad=True), ["a"] * 2, [{}] * 2)
