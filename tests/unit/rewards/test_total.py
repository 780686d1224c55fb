"""The reward of an image from its scores, and the line that says what counts."""

from typing import Any

import pytest

from gerl.config import ScorerConfig
from gerl.protocol import Prompt, ScorerFailure
from gerl.rewards.total import describe_reward, total

PROMPT = Prompt(0, "a cat")


@pytest.mark.parametrize(
    ("a", "b", "name"),
    [
        (dict(weight=1e30), dict(), "a"),  # weight times score
        (dict(scale=1e30), dict(), "a"),
        (dict(scale=1e308), dict(), "a"),  # beyond float64 as well
        (dict(scale=1e30, weight=1e-30), dict(), "a"),  # the score on its scale is what advantages are made of
        (dict(weight=2e28), dict(weight=3e28), "b"),  # only their sum
    ],
)
def test_a_total_that_float32_cannot_hold_is_a_failure(a: dict[str, Any], b: dict[str, Any], name: str) -> None:
    found = total({"a": ScorerConfig(**a), "b": ScorerConfig(**b)}, PROMPT, {"a": 1e10, "b": 1e10})
    assert isinstance(found, ScorerFailure) and found.scorer == name
    assert "float32" in found.reason and "scale or weight" in found.reason


def test_large_numbers_that_fit_are_kept() -> None:
    scorers = {"a": ScorerConfig(weight=-1e28), "b": ScorerConfig(clip=[0, 1], scale=1e308), "c": ScorerConfig(0.0)}
    assert total(scorers, PROMPT, {"a": 1e10, "b": 1e10, "c": 1e38}) == pytest.approx(-1e38)


def test_the_line_says_what_counts_how_much() -> None:
    scorers = {
        "ocr": ScorerConfig(),
        "bright": ScorerConfig(0.1, "bright.py"),
        "sharpness": ScorerConfig(0),
        "bad": ScorerConfig(-2, scale=0.5, normalise="rank", data_sources=["signs", "pages"]),
        "jpeg": ScorerConfig(0, during="validation"),
    }
    assert describe_reward(scorers) == (
        "1 x ocr + 0.1 x bright - 2 x bad (scaled, normalised by rank, for signs and pages); watched: sharpness, "
        "jpeg (in validation)"
    )
    assert describe_reward({"ocr": ScorerConfig()}) == "1 x ocr"
    assert describe_reward({"ocr": ScorerConfig(-1)}) == "-1 x ocr"
