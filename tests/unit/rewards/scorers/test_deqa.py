from typing import Any

import pytest
from http_service import scores, serving
from PIL import Image

from gerl.errors import RewardError
from gerl.protocol import Prompt
from gerl.rewards.scorers.deqa import DeqaScorer

BATCH: Any = ([Image.new("RGB", (4, 4))] * 2, ["a", "b"], [{}] * 2)


def test_the_quality_is_divided_by_five() -> None:
    with serving(scores(deqa=[4.5, 1.0])) as service:
        assert DeqaScorer(url=service.url)(*BATCH) == [0.9, 0.2]
    assert service.asked[0].json["scorer"] == "deqa"


def test_prompts_and_rows_do_not_matter() -> None:
    with serving(scores(deqa=[3.0])) as service:
        scorer = DeqaScorer(url=service.url)
        scorer.check_prompts([Prompt(0, "a", {"ref": b"not JSON"})])
        assert scorer([Image.new("RGB", (4, 4))], ["a"], [{"ref": b"not JSON"}]) == [0.6]


@pytest.mark.parametrize("value", [0.9, 0.0, 5.2, 90.0])
def test_a_number_that_is_no_quality_is_an_error(value: float) -> None:
    answer, message = scores(deqa=[4.5, value]), "gave image 1 of 2 a quality of"
    with serving(answer) as service, pytest.raises(RewardError, match=message):
        DeqaScorer(url=service.url)(*BATCH)


def test_rounding_in_half_precision_is_no_error() -> None:
    with serving(scores(deqa=[0.998, 5.004])) as service:
        assert DeqaScorer(url=service.url)(*BATCH) == pytest.approx([0.2, 1.0], abs=1e-3)
