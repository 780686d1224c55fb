"""A function of the program as a reward: its arguments, and where its errors lie."""

from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image

from gerl.config import ScorerConfig
from gerl.errors import RewardError
from gerl.objects import PREFIX, function, offered, pipeline
from gerl.protocol import Images
from gerl.rewards.manager import given
from gerl.rewards.scorers import build_scorer
from gerl.rewards.worker import RewardWorker

IMAGES = [Image.new("RGB", (2, 2))]


def of_images(images: list[Image.Image]) -> list[float]:
    return [1.0 for _ in images]


def of_two(images: list[Image.Image], prompts: list[str]) -> list[float]:
    return [float(len(p)) for p in prompts]


def of_all(
    images: list[Image.Image], prompts: list[str], metadata: list[dict[str, int]], scale: float = 1.0
) -> list[float]:
    return [scale * row["x"] for row in metadata]


def fails(images: list[Image.Image]) -> list[float]:
    raise ValueError("no")


@pytest.mark.parametrize(("called", "score"), [(of_images, 1.0), (of_two, 2.0), (of_all, 3.0), (lambda i: [4.0], 4.0)])
def test_functions_take_what_they_name(called: Callable[..., list[float]], score: float) -> None:
    with offered({"f": called}, {}):
        scorer = build_scorer("f", ScorerConfig(path=f"{PREFIX}f"))
    assert scorer(IMAGES, ["ab"], [{"x": 3}]) == [score]


def test_kwargs_are_those_of_the_function() -> None:
    with offered({"f": of_all}, {}):
        assert build_scorer("f", ScorerConfig(path="python:f", kwargs={"scale": 2.0}))(IMAGES, ["a"], [{"x": 3}]) == [
            6.0
        ]
        with pytest.raises(RewardError, match=r"reward\.scorers\.f: f\(.*cannot be called"):
            build_scorer("f", ScorerConfig(path="python:f", kwargs={"y": 2.0}))
    with offered({"f": lambda: 1}, {}), pytest.raises(RewardError, match="cannot be called"):
        build_scorer("f", ScorerConfig(path="python:f"))


def test_without_its_program_a_function_is_not_there() -> None:
    with offered({"f": of_images}, {"signs": object()}):
        assert function("python:f") is of_images and pipeline("signs") is not None
        with offered({"g": of_two}, {}):
            assert function("python:f") is of_images and function("python:g") is of_two
        assert function("python:g") is None
    assert function("python:f") is None and pipeline("signs") is None
    with pytest.raises(RewardError, match=r"reward\.scorers\.f\.path=python:f: .*gerl\.train.*resume"):
        build_scorer("f", ScorerConfig(path="python:f"))


def test_a_worker_gets_its_functions_and_names_the_line_that_raised() -> None:
    scorers = {"f": ScorerConfig(path="python:f"), "ocr": ScorerConfig()}
    with offered({"f": fails, "other": of_two}, {}):
        functions = given(scorers)
        assert functions == {"f": fails}
        worker = RewardWorker({"f": scorers["f"]}, 0, ".", functions)
        worker.ready()
        answer = worker.score("f", [(0, 0)], ["a"], [{}], Images(0, np.zeros((1, 2, 2, 3), np.uint8), 0.0))
    reason = answer.rows[0]["f"].reason  # type: ignore[union-attr]
    assert "ValueError: no" in reason and "test_function.py, line" in reason and 'raise ValueError("no")' in reason
