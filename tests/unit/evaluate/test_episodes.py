"""Variants of episodes, and the row of an episode from the scores of its turns."""

from typing import Any

import numpy as np
import pytest

from gerl.config import Config, from_mapping
from gerl.errors import ConfigError
from gerl.evaluate.episodes import Sampled, rows_of
from gerl.evaluate.loras import roles_alone
from gerl.protocol import Images, Prompt, Sample, ScorerFailure, Scores, Turn
from gerl.trainer.turns import Turns


def config(**keys: Any) -> Config:
    turns = [{"role": "draw"}, {"role": "edit", "request": "brighter {prompt}"}]
    return from_mapping({"episode": {"turns": turns, "roles": {"edit": {}}, **keys}})


def test_the_roles_that_are_evaluated_alone() -> None:
    assert roles_alone(config(), "all") == ("draw", "edit")
    assert roles_alone(config(train={"alternate": 2}), "all") == ("draw", "edit")
    assert roles_alone(config(train=["edit"]), "all") == ()  # it is all that the checkpoint has
    assert roles_alone(config(train=["edit"]), "draw, edit") == ("draw", "edit")
    assert roles_alone(config(), "none") == ()
    with pytest.raises(ConfigError, match=r"roles=paint.*draw, edit"):
        roles_alone(config(), "paint")


def turn(number: int, role: str, request: str, columns: dict[str, float | None], failed: str = "") -> Sampled:
    prompt = Prompt(7, "a cat", turn=Turn(number, role, request))
    scores = Scores([Sample(prompt, 0, 11, 0)], [columns.pop("total")], {n: [v] for n, v in columns.items()})
    scores.failures = [[ScorerFailure(failed, "it broke")] if failed else []]
    return Sampled(scores, [Images(0, np.full((1, 8, 8, 3), number, np.uint8), 0.0)])


def test_a_row_has_the_scores_of_the_last_turn_and_those_before_it_by_turn() -> None:
    first = turn(0, "draw", "", {"total": 0.5, "ocr": 0.5, "late": None})
    last = turn(1, "edit", "brighter a cat", {"total": 0.25, "ocr": None, "late": 0.25})
    (row,) = rows_of("mine/edit", Turns(config()), [first, last])
    assert row.values == {"total": 0.25, "late": 0.25, "turn_0/total": 0.5, "turn_0/ocr": 0.5}
    assert (row.prompt_id, row.prompt, row.index, row.seed, row.variant) == (7, "a cat", 0, 11, "mine/edit")
    assert row.requests == {"turn_1/request": "brighter a cat"} and row.given == () and row.failure == ""
    assert [image.role for image in row.turns] == ["draw", "edit"] and row.turns[1].picture == row.picture
    assert row.turns[0].picture != row.picture


def test_a_failure_names_its_turn() -> None:
    first = turn(0, "draw", "", {"total": None, "ocr": None}, failed="ocr")
    (row,) = rows_of("base", Turns(config()), [first, turn(1, "edit", "", {"total": 0.25, "ocr": 0.25})])
    assert row.values == {"total": 0.25, "ocr": 0.25, "turn_0/total": None, "turn_0/ocr": None}
    assert row.failure == "turn 0: ocr: it broke"
