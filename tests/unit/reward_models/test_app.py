"""The HTTP side, mostly over a real socket: what a client sees is what counts."""

import base64
import io
from typing import Any

import pytest
import requests
from PIL import Image
from reward_service import (
    IMAGE,
    IMAGES,
    ROWS,
    TOKEN,
    TWO,
    LocalScoring,
    Red,
    body,
    huge_png,
    metric,
    nested,
    post,
    remote,
    serving,
)
from starlette.testclient import TestClient

from gerl.errors import RewardError
from gerl.rewards.scorers.simple import JpegIncompressibility
from reward_models.app import Limits, build_app
from reward_models.scorers.http import png_base64
from reward_models.scoring import Refusal


def test_the_client_gets_what_the_scorer_gives() -> None:
    expected = Red()(IMAGES, *ROWS)
    with serving() as url:
        for size in (1, 2, 8):
            assert remote(url, batch_size=size)(IMAGES, *ROWS) == expected
        live = {"status": "live", "version": "1", "scorers": ["red"]}
        assert requests.get(f"{url}/v1/health", timeout=10).json() == live
        assert requests.get(f"{url}/v1/ready", timeout=10).json() == {"status": "ready", "version": "1", "replicas": 1}


def test_a_scorer_of_one_column_gives_it_its_name() -> None:
    scorer = JpegIncompressibility()
    with serving(scorer) as url:
        assert remote(url)(IMAGES, *ROWS) == {"red": scorer(IMAGES, *ROWS)}


def test_jpeg_files_and_images_with_alpha_are_taken_as_rgb() -> None:
    texts = []
    for image, kind in ((IMAGES[4], "JPEG"), (Image.new("RGBA", (2, 2), (70, 0, 0, 9)), "PNG")):
        file = io.BytesIO()
        image.save(file, kind)
        texts.append(base64.b64encode(file.getvalue()).decode())
    with serving() as url:
        scores = post(url, body(images=texts, **TWO)).json()["scores"]["red"]
    assert scores[0] == pytest.approx(40, abs=3) and scores[1] == 70


@pytest.mark.parametrize(
    ("content", "status", "sentence"),
    [
        (b'{"scorer": ', 400, "the body is not JSON"),
        (b"", 422, "the body: Field required"),
        (b"[1]", 422, "the body: Input should be"),
        (body(images=[]), 422, "images: List should have at least 1 item"),
        (body(images=[1]), 422, "images.0: Input should be a valid string"),
        (body(prompts=["a", "b"]), 422, "got 1 images with 2 prompts and 1 metadata"),
        (body(more=1), 422, "more: Extra inputs are not permitted"),
        (body(scorer="blue"), 404, "there is no scorer 'blue' here, only red"),
        (body(images=["no base64!"]), 422, "image 0 of 1 is not base64"),
        (body(images=[base64.b64encode(b"GIF89a").decode()]), 422, "image 0 of 1 is neither a PNG nor a JPEG"),
        (body(images=[IMAGE, IMAGE[:-500]], **TWO), 422, "image 1 of 2 is a broken file"),
        (body(images=[png_base64(Image.new("RGB", (1001, 1000)))]), 413, "more than 1 million pixels"),
        (body(images=[IMAGE] * 257, prompts=["a"] * 257, metadata=[{}] * 257), 413, "at most 256 are allowed"),
        (body(images=[huge_png(13000, 13800)]), 413, "image 0 of 1 has too many pixels, more than 64 million"),
        (body(images=[huge_png(8000, 8001)]), 413, "image 0 of 1 has too many pixels, more than 64 million"),
        (body(images=[1] * 10**5), 422, "images.0: Input should be a valid string (see"),
        (body(metadata=[nested(40)]), 422, "metadata 0 has more than 32 nested objects or lists"),
        (b'{"scorer": ' + b"[" * 10**5, 400, "parsing the body"),
        (b'{"scorer": ' + b"1" * 10**4 + b"}", 400, "body"),
        (body(metadata=[{"data": 1}]), 422, "the row cannot be scored: write another"),
        (body(metadata=[{"raise": 1}]), 500, "the scorer red failed: KeyError: 'lost'"),
        (body(metadata=[{"score": "7"}]), 500, "returned '7' for image 0 in column red, expected a finite number"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(content: Any, status: int, sentence: str) -> None:
    with serving() as url:
        answer = post(url, content)
        assert metric(url, "gerl_reward_images_total") == 0
    assert answer.status_code == status
    assert sentence in answer.json()["error"] and answer.json()["version"] == "1"
    assert len(answer.content) < 400  # the images are not sent back


def test_a_slow_answer_is_the_clients_time_out_and_the_next_one_comes() -> None:
    scorer = Red()
    with serving(scorer) as url:
        with pytest.raises(RewardError, match=r"no answer within 0\.3 s: raise timeout"):
            remote(url, timeout=0.3)(IMAGES[:1], ["a"], [{"wait": 1}])
        scorer.leave.set()
        assert remote(url)(IMAGES, *ROWS)["red"] == [0.0, 10.0, 20.0, 30.0, 40.0]


def test_metrics_count_requests_images_errors_and_seconds() -> None:
    with serving() as url:
        remote(url, batch_size=2)(IMAGES, *ROWS)
        post(url, body(scorer="blue"))
        post(url, body(metadata=[{"raise": 1}]))
        assert metric(url, "gerl_reward_requests_total") == 5
        assert metric(url, "gerl_reward_images_total") == 5
        assert metric(url, "gerl_reward_request_seconds_count") == 5
        assert 0 < metric(url, "gerl_reward_request_seconds_sum") < 10
        assert metric(url, 'gerl_reward_errors_total{reason="scorer_name"}') == 1
        assert metric(url, 'gerl_reward_errors_total{reason="scorer"}') == 1


def test_the_openapi_page_describes_requests_answers_and_the_token() -> None:
    with serving(limits=Limits(token=TOKEN)) as url:
        schema = requests.get(f"{url}/openapi.json", timeout=10).json()
        assert requests.get(f"{url}/docs", timeout=10).status_code == 200
    operation = schema["paths"]["/v1/score"]["post"]
    assert operation["security"] == [{"HTTPBearer": []}]
    assert {"200", "401", "413", "422", "429", "500"} <= set(operation["responses"])
    required = schema["components"]["schemas"]["ScoreRequest"]["required"]
    assert set(required) == {"scorer", "images", "prompts", "metadata"}


def test_a_scorer_that_is_not_there_yet_is_not_ready() -> None:
    class Starting(LocalScoring):
        async def state(self) -> Refusal:
            return Refusal(503, "no replica of the scorer runs yet: ask again")

        async def score(self, *_: Any) -> Refusal:
            return await self.state()

    app = build_app("red", Starting(Red()))
    client = TestClient(app)
    for answer in (client.get("/v1/ready"), client.post("/v1/score", json=body())):
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
        assert answer.json()["error"].startswith("no replica")
    assert client.get("/v1/health").status_code == 200
