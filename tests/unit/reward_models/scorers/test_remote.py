import math
import threading
from typing import Any

import pytest
from http_service import Answer, Asked, picture, scores, serving
from PIL import Image

from gerl.errors import DataError, RewardError
from gerl.protocol import Prompt
from reward_models.scorers.remote import DeqaScorer, RemoteScorer

IMAGES = [Image.new("RGB", (4, 2), (10 * i, 0, 0)) for i in range(5)]
BATCH: tuple[list[Image.Image], list[str], list[dict[str, Any]]] = (IMAGES, list("abcde"), [{"n": i} for i in range(5)])


def remote(url: str, **kwargs: Any) -> RemoteScorer:
    return RemoteScorer(url=url, scorer="red", **{"timeout": 5.0, "backoff": 0.01, "retries": 2, **kwargs})


def red(asked: Asked) -> Answer:
    """A reward service with one scorer: the red channel, and how long the prompt is."""
    return scores(
        red=[picture(text).getpixel((0, 0))[0] for text in asked.json["images"]],  # type: ignore[index]
        length=[len(prompt) / 2 for prompt in asked.json["prompts"]],
    )


def test_columns_come_back_in_order_whatever_the_size_of_the_requests() -> None:
    for size in (1, 2, 5, 8):
        with serving(red) as service:
            columns = remote(service.url, batch_size=size)(*BATCH)
        assert list(columns) == ["red", "length"]
        assert columns == {"red": [0.0, 10.0, 20.0, 30.0, 40.0], "length": [0.5] * 5}
        assert all(type(value) is float for value in columns["red"])
        assert len(service.asked) == -(-5 // size)


def test_the_request_is_the_protocol() -> None:
    with serving(red) as service:
        remote(service.url + "/")([IMAGES[1]], ["ä"], [{"n": 1, "x": [None, "y"]}])
    (asked,) = service.asked
    assert (asked.method, asked.path) == ("POST", "/v1/score")
    (image,) = map(picture, asked.json.pop("images"))
    assert asked.json == {"scorer": "red", "prompts": ["ä"], "metadata": [{"n": 1, "x": [None, "y"]}]}
    assert (image.format, image.size) == ("PNG", (4, 2))


def test_requests_of_a_batch_run_in_parallel() -> None:
    both = threading.Barrier(2, timeout=5)  # broken unless two requests are open at a time

    def answer(asked: Asked) -> Answer:
        both.wait()
        return red(asked)

    with serving(answer) as service:
        remote(service.url, batch_size=2, concurrency=2)(IMAGES[:4], list("abcd"), [{}] * 4)
    assert service.most_in_flight == 2


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (scores(red=[1.0]), "returned a list of length 1 for 5 images in column red"),
        (scores(red=[1.0] * 6), "returned a list of length 6 for 5 images"),
        (scores(red=[1.0] * 5, length=[1.0] * 4), "returned a list of length 4 for 5 images in column length"),
        (scores(red=1.0), "returned a float for 5 images"),
        (scores(red=[1.0, 1.0, math.nan, 1.0, 1.0]), r"returned 'NaN' for image 2 of 5 in column red"),
        (scores(red=[math.inf] * 5), "returned 'Infinity' for image 0"),
        (scores(red=[1.0, "2", 3.0, 4.0, 5.0]), r"returned '\"2\"' for image 1"),
        (scores(red=[None] * 5), "returned 'null' for image 0"),
        (scores(red=[True] * 5), "returned 'true' for image 0"),
        (scores(red=[10**400] * 5), "returned '1000.*for image 0.*finite number"),
        (Answer(b'{"scores": {"red": [1e999, 1, 1, 1, 1]}, "version": "1"}'), "returned 'Infinity' for image 0"),
        (scores(**{"\ud800": [1.0] * 5}), "name .*ud800.*correct it"),
        (scores(**{"red\n": [1.0] * 5}), "name 'red.*correct it"),
        (Answer(b'{"version": "1", "scores": ' + b"[" * 900 + b"]" * 900 + b"}"), "expected scores by column"),
        (scores(), "expected scores by column"),
        (Answer({"scores": [1.0] * 5, "version": "1"}), "expected scores by column"),
        (Answer({"scores": {"red": [1.0] * 5}}), "version '1'"),
        (Answer({"scores": {"red": [1.0] * 5}, "version": "2"}), "version '1'"),
        (Answer([1.0] * 5), "version '1'.*gerl reward service"),
        (Answer(b'{"scores": {"red": [1.0'), "answered 200 without JSON"),
        (Answer({"error": "no scorer red, only ocr"}, 404), "only ocr.*correct the address and the name"),
        (Answer({}, 413), "lower image_size"),
    ],
)
def test_an_answer_that_breaks_the_protocol_is_an_error(answer: Answer, message: str) -> None:
    with serving(answer) as service, pytest.raises(RewardError, match=message):
        remote(service.url)(*BATCH)
    assert len(service.asked) == 1


def test_columns_that_change_between_requests_are_an_error() -> None:
    def answer(asked: Asked) -> Answer:
        first = "a" in asked.json["prompts"]
        return scores(**{"red" if first else "blue": [1.0] * len(asked.json["images"])})

    with serving(answer) as service, pytest.raises(RewardError, match="the columns red and then blue"):
        remote(service.url, batch_size=3)(*BATCH)


def test_images_may_be_reduced() -> None:
    with serving(red) as service:
        remote(service.url, image_size=2)(*BATCH)
    assert {picture(text).size for text in service.asked[0].json["images"]} == {(2, 1)}


@pytest.mark.parametrize("value", [math.nan, b"bytes", IMAGES[0], {"a": [math.inf]}])
def test_a_row_that_cannot_be_sent_is_named_without_asking_the_service(value: Any) -> None:
    scorer = remote("http://127.0.0.1:1")
    scorer.check_prompts([Prompt(0, "a", {"n": [1, None, "x"]})])
    with pytest.raises(DataError, match=r"prompt 4: 'b' has ref=.*cannot be sent"):
        scorer.check_prompts([Prompt(0, "a"), Prompt(4, "b", {"ref": value})])
    with pytest.raises(DataError, match=r"'b' has ref=.*cannot be sent"):
        scorer(IMAGES[:1], ["b"], [{"ref": value}])


def test_no_images_are_an_error() -> None:
    with pytest.raises(RewardError, match="got no images"):
        remote("http://127.0.0.1:1")([], [], [])


DEQA_BATCH: Any = ([Image.new("RGB", (4, 4))] * 2, ["a", "b"], [{}] * 2)


def test_the_quality_is_divided_by_five() -> None:
    with serving(scores(deqa=[4.5, 1.0])) as service:
        assert DeqaScorer(url=service.url)(*DEQA_BATCH) == [0.9, 0.2]
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
        DeqaScorer(url=service.url)(*DEQA_BATCH)


def test_rounding_in_half_precision_is_no_error() -> None:
    with serving(scores(deqa=[0.998, 5.004])) as service:
        assert DeqaScorer(url=service.url)(*DEQA_BATCH) == pytest.approx([0.2, 1.0], abs=1e-3)
