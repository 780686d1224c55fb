"""The HTTP side, mostly over a real socket: what a client sees is what counts."""

import asyncio
import base64
import io
import json
import logging
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import requests
import uvicorn
from PIL import Image
from starlette.testclient import TestClient

from gerl.errors import DataError, RewardError
from gerl.rewards.scorers import Scorer
from gerl.rewards.scorers.http import png_base64
from gerl.rewards.scorers.jpeg import JpegIncompressibility
from gerl.rewards.scorers.remote import RemoteScorer
from reward_models.app import build_app
from reward_models.guard import Limits, Room, TokenBucket
from reward_models.scoring import Columns, ImageLimits, Item, Refusal, decode, join, measure, score_items, warm_up

IMAGES = [Image.new("RGB", (4, 2), (10 * i, 0, 0)) for i in range(5)]
ROWS: tuple[list[str], list[dict[str, Any]]] = (list("abcde"), [{} for _ in range(5)])
TOKEN = "secret-42"


class LocalScoring:
    """Scores in a thread of this process, one request at a time."""

    def __init__(self, scorer: Scorer) -> None:
        self.scorer = scorer
        self._lock = asyncio.Lock()  # a scorer need not be thread-safe

    async def score(self, images: list[bytes], prompts: list[str], metadata: list[dict[str, Any]]) -> Columns | Refusal:
        pictures = decode(images)
        if isinstance(pictures, Refusal):
            return pictures
        items = [Item(0, i, *row) for i, row in enumerate(zip(pictures, prompts, metadata, strict=True))]
        async with self._lock:
            return join("red", await asyncio.to_thread(score_items, "red", self.scorer, items))

    async def state(self) -> dict[str, Any] | Refusal:
        return {"replicas": 1}


class Red(Scorer):
    """The red channel; metadata say what else happens. `batches` has the size of every call."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.entered, self.leave = threading.Event(), threading.Event()

    def __call__(self, images: list[Image.Image], prompts: list[str], metadata: list[dict[str, Any]]) -> Columns:
        self.batches.append(len(images))
        for row in metadata:
            if "wait" in row:
                self.entered.set()
                assert self.leave.wait(10)
            if "data" in row:
                raise DataError("the row cannot be scored: write another")
            if "raise" in row:
                raise KeyError("lost")
        red = [float(np.asarray(image)[0, 0, 0]) for image in images]
        return {
            "red": [row.get("score", value) for row, value in zip(metadata, red, strict=True)],
            "length": [float(len(prompt)) for prompt in prompts],
        }


@contextmanager
def serving(scorer: Any = None, limits: Limits | None = None) -> Iterator[str]:
    """The URL of the application under uvicorn in a thread."""
    app = build_app("red", LocalScoring(scorer or Red()), limits or Limits(max_megapixels=1))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", access_log=False, lifespan="off"))
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(10)


def remote(url: str, **kwargs: Any) -> RemoteScorer:
    return RemoteScorer(url=url, scorer="red", **{"timeout": 10.0, "backoff": 0.01, "retries": 0, **kwargs})


def body(**changes: Any) -> dict[str, Any]:
    return {"scorer": "red", "images": [png_base64(IMAGES[1])], "prompts": ["a"], "metadata": [{}], **changes}


IMAGE, TWO = png_base64(Image.effect_noise((64, 64), 50)), {"prompts": ["a", "b"], "metadata": [{}, {}]}


def huge_png(width: int, height: int) -> str:
    """The file of an image without its pixels, in base64."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = b"IDAT" + zlib.compress(b"")
    chunks = [struct.pack(">I", len(c) - 4) + c + struct.pack(">I", zlib.crc32(c)) for c in (header, pixels, b"IEND")]
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(chunks)).decode()


def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels):
        value = {"a": value}
    return value


def talk(url: str, *pieces: bytes) -> bytes:
    """All that the service answers to bytes on a socket."""
    host, port = url.removeprefix("http://").split(":")
    answer = b""
    with socket.create_connection((host, int(port)), timeout=10) as client:
        for piece in pieces:
            client.sendall(piece)
        while b"\r\n\r\n" not in answer and (part := client.recv(4096)):
            answer += part
    return answer


def post(url: str, content: Any, token: str | None = None) -> requests.Response:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    return requests.post(f"{url}/v1/score", data, headers=headers, timeout=10)


def metric(url: str, name: str) -> float:
    """A number at /metrics, 0 if it is not there yet."""
    lines = requests.get(f"{url}/metrics", timeout=10).text.splitlines()
    return next((float(line.rsplit(" ", 1)[1]) for line in lines if line.rsplit(" ", 1)[0] == name), 0.0)


def eventually(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


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
        (body(prompts=["a", "b"]), 422, "1 images came with 2 prompts and 1 metadata"),
        (body(more=1), 422, "more: Extra inputs are not permitted"),
        (body(scorer="blue"), 404, "there is no scorer 'blue' here, only red"),
        (body(images=["no base64!"]), 422, "image 0 of 1 is not base64"),
        (body(images=[base64.b64encode(b"GIF89a").decode()]), 422, "image 0 of 1 is neither a PNG nor a JPEG"),
        (body(images=[IMAGE, IMAGE[:-500]], **TWO), 422, "image 1 of 2 is a broken file"),
        (body(images=[png_base64(Image.new("RGB", (1001, 1000)))]), 413, "more than 1 million pixels"),
        (body(images=[IMAGE] * 257, prompts=["a"] * 257, metadata=[{}] * 257), 413, "at most 256 may"),
        (body(images=[huge_png(13000, 13800)]), 413, "image 0 of 1 has too many pixels, more than 64 million"),
        (body(images=[huge_png(8000, 8001)]), 413, "image 0 of 1 has too many pixels, more than 64 million"),
        (body(images=[1] * 10**5), 422, "images.0: Input should be a valid string (see"),
        (body(metadata=[nested(40)]), 422, "metadata 0 has more than 32 objects or lists inside each other"),
        (b'{"scorer": ' + b"[" * 10**5, 400, "parsing the body"),
        (b'{"scorer": ' + b"1" * 10**4 + b"}", 400, "body"),
        (body(metadata=[{"data": 1}]), 422, "the row cannot be scored: write another"),
        (body(metadata=[{"raise": 1}]), 500, "the scorer red failed: KeyError: 'lost'"),
        (body(metadata=[{"score": "7"}]), 500, "gave '7' for image 0 in column red, expected a finite number"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(content: Any, status: int, sentence: str) -> None:
    with serving() as url:
        answer = post(url, content)
        assert metric(url, "gerl_reward_images_total") == 0
    assert answer.status_code == status
    assert sentence in answer.json()["error"] and answer.json()["version"] == "1"
    assert len(answer.content) < 400  # the images are not sent back


def test_only_the_right_token_is_let_in_and_none_is_shown(caplog: pytest.LogCaptureFixture) -> None:
    with serving(limits=Limits(token=TOKEN)) as url, caplog.at_level(logging.DEBUG):
        assert post(url, body(), TOKEN).status_code == 200
        for wrong in (None, "secret", TOKEN + "x", "x" * 10**4):
            answer = post(url, body(), wrong)
            assert (answer.status_code, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
            assert TOKEN not in answer.text
        basic = requests.post(f"{url}/v1/score", headers={"Authorization": f"Basic {TOKEN}"}, timeout=10)
        assert basic.status_code == 401
        assert metric(url, 'gerl_reward_errors_total{reason="token"}') == 5
        assert requests.get(f"{url}/v1/health", timeout=10).status_code == 200
    assert TOKEN not in caplog.text


def test_the_client_sends_the_token_and_says_which_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GERL_TEST_TOKEN", TOKEN)
    with serving(limits=Limits(token=TOKEN)) as url:
        assert remote(url, token_env="GERL_TEST_TOKEN")(IMAGES, *ROWS)["red"] == [0.0, 10.0, 20.0, 30.0, 40.0]
        monkeypatch.setenv("GERL_TEST_TOKEN", "another")
        with pytest.raises(RewardError, match=r"answered 401 .*the token of token_env=GERL_TEST_TOKEN is not accepted"):
            remote(url, token_env="GERL_TEST_TOKEN")(IMAGES, *ROWS)
        with pytest.raises(RewardError, match="the service wants a token"):
            remote(url)(IMAGES, *ROWS)


def test_a_body_too_large_is_refused_however_it_comes() -> None:
    scorer = Red()
    with serving(scorer, Limits(max_body_mb=1)) as url:
        large = json.dumps(body(prompts=["x" * 1_500_000])).encode()
        answer = post(url, large)
        assert answer.status_code == 413 and "at most 1 MB may come" in answer.json()["error"]
        chunks = (large[i : i + 65536] for i in range(0, len(large), 65536))  # without Content-Length
        headers = {"Content-Type": "application/json"}
        answer = requests.post(f"{url}/v1/score", chunks, headers=headers, timeout=10)
        assert answer.status_code == 413 and "at most 1 MB may come" in answer.json()["error"]
        assert metric(url, 'gerl_reward_errors_total{reason="size"}') == 2
        noise = Image.effect_noise((1000, 900), 100)
        with pytest.raises(RewardError, match=r"answered 413 .*lower image_size"):
            remote(url)([noise] * 3, list("abc"), [{}] * 3)
    assert scorer.batches == []


@pytest.mark.parametrize("header", ["Content-Length: 999999999999", "Content-Length: 2000000\r\nExpect: 100-continue"])
def test_a_body_too_large_is_refused_before_it_is_sent(header: str) -> None:
    with serving(limits=Limits(max_body_mb=1)) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=5) as client:
            client.sendall(f"POST /v1/score HTTP/1.1\r\nHost: x\r\n{header}\r\n\r\n".encode())
            assert client.recv(100).startswith(b"HTTP/1.1 413 ")


def test_more_requests_than_the_rate_are_told_when_to_come_back() -> None:
    with serving(limits=Limits(rate_per_minute=2)) as url:
        answers = [post(url, body()) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        assert 25 <= int(answers[2].headers["Retry-After"]) <= 30
        assert "more than 2 requests a minute" in answers[2].json()["error"]
        assert requests.get(f"{url}/v1/health", timeout=10).status_code == 200
        with pytest.raises(RewardError, match=r"answered 429 .*lower concurrency"):
            remote(url)(IMAGES, *ROWS)


def test_the_bucket_refills_at_the_rate_and_holds_a_minute() -> None:
    now = [0.0]
    bucket = TokenBucket(6, lambda: now[0])
    assert [bucket.take() for _ in range(7)] == [0.0] * 6 + [10.0]
    now[0] = 9.0
    assert bucket.take() == pytest.approx(1.0)
    now[0] = 10.0
    assert bucket.take() == 0.0 and bucket.take() == pytest.approx(10.0)
    now[0] = 1e6
    assert [bucket.take() == 0.0 for _ in range(7)] == [True] * 6 + [False]
    assert not any(TokenBucket(0).take() for _ in range(1000))


def test_requests_beyond_the_number_in_flight_wait_and_all_are_scored() -> None:
    scorer = Red()
    with serving(scorer, Limits(max_in_flight=1)) as url:
        first = threading.Thread(target=post, args=(url, body(metadata=[{"wait": 1}])))
        first.start()
        assert scorer.entered.wait(5)
        answer = post(url, body())
        assert (answer.status_code, answer.headers["Retry-After"]) == (429, "1")
        assert metric(url, "gerl_reward_requests_in_flight") == metric(url, "gerl_reward_queue_images") == 1
        later: list[Any] = []
        second = threading.Thread(target=lambda: later.append(remote(url, retries=5)(IMAGES, *ROWS)))
        second.start()
        eventually(lambda: metric(url, 'gerl_reward_errors_total{reason="rate"}') >= 2)
        scorer.leave.set()
        first.join()
        second.join()
        assert metric(url, "gerl_reward_requests_in_flight") == metric(url, "gerl_reward_queue_images") == 0
    assert later == [Red()(IMAGES, *ROWS)]


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
        ([1.0], "gave 1 scores for 2 images"),
        ("ab", "expected a list with one number"),
        ({}, "expected a list with one number"),
        ({"a": "xy"}, "expected a list with one number"),
        (3.0, "failed: returned 3.0, expected a list"),
        ([1.0, float("nan")], "gave nan for image 1 in column red"),
        ([None, 1.0], "gave None for image 0"),
    ],
)
def test_an_answer_that_is_no_list_of_numbers_is_refused(returned: Any, message: str) -> None:
    for row in score_items("red", lambda *_: returned, items((0, {}), (0, {}))):  # type: ignore[arg-type]
        assert isinstance(row, Refusal) and row.status == 500 and message in row.message


def test_rows_with_other_columns_are_refused() -> None:
    assert join("red", [{"a": 1.0, "b": 2.0}, {"a": 3.0, "b": 4.0}]) == {"a": [1.0, 3.0], "b": [2.0, 4.0]}
    refused = join("red", [{"a": 1.0}, {"b": 1.0}])
    assert isinstance(refused, Refusal) and "gave the columns a and then b" in refused.message
    assert join("red", [{"a": 1.0}, Refusal(500, "x")]) == Refusal(500, "x")


def test_pixels_are_counted_over_the_request_before_any_is_decoded() -> None:
    limits = ImageLimits(max_megapixels=1)
    file = base64.b64decode(png_base64(Image.new("RGB", (600, 1000))))
    headers_only = file[:100]  # decoding this one would fail
    assert measure([file], limits) == 600_000
    refused = measure([headers_only, headers_only], limits)
    assert isinstance(refused, Refusal) and refused.status == 413 and "images 0 to 1 of 2" in refused.message


REQUEST = b"POST /v1/score HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (b"Content-Length: -1\r\n", b"400"),
        (b"Content-Length: many\r\n", b"400"),
        (b"Content-Length: 1\r\nContent-Length: 2\r\n", b"400"),
        (b"Content-Length: " + b"9" * 30 + b"\r\n", b"4"),
        (b"", b"411"),
    ],
)
def test_a_length_that_is_none_is_refused_before_the_body(header: bytes, status: bytes) -> None:
    with serving() as url:
        assert talk(url, REQUEST + header + b"\r\n").startswith(b"HTTP/1.1 " + status)
        assert post(url, body()).status_code == 200


@pytest.mark.parametrize("header", [b"Content-Length: 1000000\r\n", b"Transfer-Encoding: chunked\r\n"])
def test_without_the_token_no_byte_of_the_body_is_waited_for(header: bytes) -> None:
    with serving(limits=Limits(token=TOKEN)) as url:
        start = time.monotonic()
        assert talk(url, REQUEST + header + b"\r\n").startswith(b"HTTP/1.1 401 ")
        assert time.monotonic() - start < 5


def test_a_body_that_does_not_come_gives_its_place_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reward_models.guard.BODY_SECONDS", 0.3)
    with serving(limits=Limits(max_in_flight=1)) as url:
        answer = talk(url, REQUEST + b"Content-Length: 100\r\n\r\n{")
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert post(url, body()).status_code == 200


def test_bodies_under_way_have_a_limit_together() -> None:
    scorer = Red()
    with serving(scorer, Limits(max_body_mb=1, max_in_flight_mb=1)) as url:
        first = threading.Thread(target=post, args=(url, body(prompts=["x" * 600_000], metadata=[{"wait": 1}])))
        first.start()
        assert scorer.entered.wait(5)
        answer = post(url, body(prompts=["x" * 600_000]))
        assert (answer.status_code, answer.headers["Retry-After"]) == (429, "1")
        assert "at most 1 MB may come together" in answer.json()["error"]
        assert post(url, body(prompts=["x" * 900_000])).status_code == 429
        scorer.leave.set()
        first.join()
        assert post(url, body(prompts=["x" * 600_000])).status_code == 200


def test_pixels_under_way_have_a_limit_together_and_more_wait() -> None:
    scorer = Red()
    large = png_base64(Image.new("RGB", (1000, 600), (7, 0, 0)))
    with serving(scorer, Limits(max_megapixels=1, max_in_flight_megapixels=1)) as url:
        first = threading.Thread(target=post, args=(url, body(images=[large], metadata=[{"wait": 1}])))
        first.start()
        assert scorer.entered.wait(5)
        answers: list[Any] = []
        second = threading.Thread(target=lambda: answers.append(post(url, body(images=[large]))))
        second.start()
        eventually(lambda: metric(url, "gerl_reward_requests_in_flight") == 2)
        assert metric(url, "gerl_reward_queue_images") == 1 and scorer.batches == [1]  # not handed on yet
        scorer.leave.set()
        first.join()
        second.join()
        assert answers[0].json()["scores"]["red"] == [7.0]


def test_waiting_for_pixels_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reward_models.app.WAIT_SECONDS", 0.1)
    scorer = Red()
    large = png_base64(Image.new("RGB", (1000, 600)))
    with serving(scorer, Limits(max_megapixels=1, max_in_flight_megapixels=1)) as url:
        first = threading.Thread(target=post, args=(url, body(images=[large], metadata=[{"wait": 1}])))
        first.start()
        assert scorer.entered.wait(5)
        answer = post(url, body(images=[large]))
        scorer.leave.set()
        first.join()
        assert answer.status_code == 429 and "max_in_flight_megapixels" in answer.json()["error"]
        assert post(url, body(images=[large])).status_code == 200


def test_room_is_given_back_whatever_happens() -> None:
    async def use() -> list[bool]:
        room, entered = Room(10), []
        with pytest.raises(ValueError, match="lost"):
            async with room.hold(10, 1):
                raise ValueError("lost")
        async with room.hold(6, 1), room.hold(4, 1) as fits, room.hold(1, 0.01) as more:
            entered += [fits, more]
        async with room.hold(10, 0.01) as again:
            return [*entered, again]

    assert asyncio.run(use()) == [True, False, True]


def test_a_warm_up_that_fails_says_what_to_give() -> None:
    scorer = Red()
    warm_up("red", scorer, "a", {})
    assert scorer.batches == [1]
    with pytest.raises(RewardError, match=r"warm-up of scorer red .*KeyError.*warm_metadata, or warm_up=false"):
        warm_up("red", scorer, "a", {"raise": 1})
