"""Which images of a list are compared: those of equal rows, as in training."""

import logging
from pathlib import Path

import pytest

from gerl.protocol import Prompt
from gerl.score.inputs import Item, describe_groups, groups_of


def items(*rows: tuple[str, dict[str, object]]) -> list[Item]:
    return [Item(Path(f"{i}.png"), f"{i}.png", Prompt(i, text, row)) for i, (text, row) in enumerate(rows)]


A, B = {"source": "a.png"}, {"source": "b.png", "turn": [1, {"x": 2}]}


def test_images_are_compared_whose_prompts_are_equal_in_text_and_columns(caplog: pytest.LogCaptureFixture) -> None:
    found = items(("edit", A), ("edit", B), ("other", A), ("edit", dict(A)), ("edit", dict(reversed(B.items()))))
    groups = groups_of(found)
    assert groups == [[0, 3], [1, 4], [2]]
    with caplog.at_level(logging.INFO):
        describe_groups(found, groups, {"diversity"})
    assert "same source, turn: 3 groups of 1 to 2 images" in caplog.text and caplog.records[0].levelname == "INFO"


def test_a_column_that_keeps_all_images_apart_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    found = items(("a", {"seed": 1}), ("a", {"seed": 2}))
    describe_groups(found, groups_of(found), {"diversity"})
    assert "no two have the same seed" in caplog.text and caplog.records[0].levelname == "WARNING"
