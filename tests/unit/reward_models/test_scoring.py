"""Scoring without HTTP: batches shared by requests, answers that are none, pixels, warming up."""

import base64
from typing import Any

import pytest
from PIL import Image
from reward_service import IMAGES, Red

from gerl.errors import RewardError
from reward_models.scorers.http import png_base64
from reward_models.scoring import ImageLimits, Item, Refusal, join, measure, score_items, warm_up


def items(*rows: tuple[int, dict[str, Any]]) -> list[Item]:
    return [Item(request, i, IMAGES[i], "ab", row) for i, (request, row) in enumerate(rows)]


def test_requests_that_share_a_batch_do_not_share_failures() -> None:
    scorer = Red()
    rows = score_items("red", scorer, items((0, {}), (1, {"raise": 1}), (0, {}), (2, {"data": 1}), (1, {})))
    good = {"red": 0.0, "length": 2.0}
    assert rows[0] == good and rows[2] == {**good, "red": 20.0}
    assert isinstance(rows[1], Refusal) and rows[1].status == 500 and rows[4] == rows[1]
    assert rows[3] == Refusal(422, "the row cannot be scored: write another")
    assert scorer.batches == [5, 2, 2, 1]
    assert score_items("red", Red(), items((0, {}), (1, {})))[1] == {"red": 10.0, "length": 2.0}


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1.0], "returned a list of length 1 for 2 images"),
        ("ab", "expected a list with one number"),
        ({}, "expected a list with one number"),
        ({"a": "xy"}, "expected a list with one number"),
        (3.0, "failed: returned 3.0, expected a list"),
        ([1.0, float("nan")], "returned nan for image 1 in column red"),
        ([None, 1.0], "returned None for image 0"),
    ],
)
def test_an_answer_that_is_no_list_of_numbers_is_refused(returned: Any, message: str) -> None:
    for row in score_items("red", lambda *_: returned, items((0, {}), (0, {}))):  # type: ignore[arg-type]
        assert isinstance(row, Refusal) and row.status == 500 and message in row.message


def test_rows_with_other_columns_are_refused() -> None:
    assert join("red", [{"a": 1.0, "b": 2.0}, {"a": 3.0, "b": 4.0}]) == {"a": [1.0, 3.0], "b": [2.0, 4.0]}
    refused = join("red", [{"a": 1.0}, {"b": 1.0}])
    assert isinstance(refused, Refusal) and "returned the columns a and then b" in refused.message
    assert join("red", [{"a": 1.0}, Refusal(500, "x")]) == Refusal(500, "x")


def test_pixels_are_counted_over_the_request_before_any_is_decoded() -> None:
    limits = ImageLimits(max_megapixels=1)
    file = base64.b64decode(png_base64(Image.new("RGB", (600, 1000))))
    headers_only = file[:100]  # decoding this one would fail
    assert measure([file], limits) == 600_000
    refused = measure([headers_only, headers_only], limits)
    assert isinstance(refused, Refusal) and refused.status == 413 and "images 0 to 1 of 2" in refused.message


def test_a_warm_up_that_fails_says_what_to_give() -> None:
    scorer = Red()
    warm_up("red", scorer, "a", {})
    assert scorer.batches == [1]
    with pytest.raises(RewardError, match=r"warm-up of scorer red .*KeyError.*warm_metadata .*, or warm_up=false"):
        warm_up("red", scorer, "a", {"raise": 1})
