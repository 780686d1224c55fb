"""The example of a reward with a gradient: it knows the text that a sign has from others, and says how to paint it."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
from legibility_reward import compute_score, drawing


def sign(text: str, paint: float = 0.9, board: float = 0.2) -> torch.Tensor:
    """A grey sign, [1, 3, 32, 96]."""
    return (board + (paint - board) * drawing(text)).expand(1, 3, -1, -1).clone()


def asked(text: str) -> list[str]:
    return [f'a red sign that reads "{text}"']


@pytest.mark.parametrize(("paint", "board"), [(0.9, 0.2), (0.1, 0.8)])
def test_the_text_that_is_asked_for_scores_best(paint: float, board: float) -> None:
    image = sign("482", paint, board)
    assert float(compute_score(image, asked("482"), [{}])) == pytest.approx(1, abs=1e-5)
    assert float(compute_score(image.roll((1, -1), (2, 3)), asked("482"), [{}])) > 0.99
    missing = compute_score(sign("4", paint, board).roll(-14, 3), asked("482"), [{}])
    assert 0.3 < float(missing) < 0.9 and float(compute_score(image, asked("KEY"), [{}])) < 0.7


def test_prompts_are_read_one_by_one_and_one_without_text_scores_nothing() -> None:
    images = torch.cat([sign("AB"), sign("AB"), torch.full((1, 3, 32, 96), 0.5)])
    scores = compute_score(images, [*asked("ab"), "a red sign", *asked("ab")], [{}] * 3)
    assert scores.tolist() == pytest.approx([1, 0, 0], abs=1e-5)


def test_the_gradient_is_that_of_finite_differences() -> None:
    rng = np.random.default_rng(0)
    image = sign("7K").double() + torch.from_numpy(rng.normal(0, 0.1, (1, 3, 32, 96)))
    direction = torch.from_numpy(rng.normal(0, 1, (1, 3, 32, 96)))
    image.requires_grad_()
    score = compute_score(image, asked("70"), [{}])
    (gradient,) = torch.autograd.grad(score.sum(), image)
    with torch.no_grad():
        up, down = (float(compute_score(image + h * direction, asked("70"), [{}])) for h in (1e-5, -1e-5))
    assert float((gradient * direction).sum()) == pytest.approx((up - down) / 2e-5, rel=1e-4)
