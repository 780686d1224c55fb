"""Who is let in and how much: tokens, sizes, rates, and the room that requests have together."""

import asyncio
import json
import logging
import socket
import threading
import time
from typing import Any

import pytest
import requests
from PIL import Image
from reward_service import IMAGES, ROWS, TOKEN, Red, body, eventually, metric, post, remote, serving, talk

from gerl.errors import RewardError
from gerl.web.server import TokenBucket
from reward_models.app import Limits, Room
from reward_models.scorers.http import png_base64


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


def test_no_page_of_another_site_may_use_a_service_without_a_token() -> None:
    with serving(limits=Limits(local=True)) as url:

        def status(**headers: str) -> int:
            return requests.post(f"{url}/v1/score", json=body(), headers=headers, timeout=10).status_code

        assert status() == 200 and status(Host="localhost:8000") == 200
        assert status(Origin="https://evil.example") == status(**{"Sec-Fetch-Site": "cross-site"}) == 403
        assert status(Host="evil.example") == 403  # a name of another site that points to this machine
        for path in ("/metrics", "/v1/ready", "/openapi.json"):
            assert requests.get(url + path, headers={"Host": "evil.example"}, timeout=10).status_code == 403
        text = {"data": json.dumps(body()), "headers": {"Content-Type": "text/plain"}}
        assert requests.post(f"{url}/v1/score", timeout=10, **text).status_code == 415
    with serving() as url:
        assert (
            requests.post(f"{url}/v1/score", json=body(), headers={"Host": "a.example"}, timeout=10).status_code == 200
        )


def test_the_client_sends_the_token_and_says_which_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GERL_TEST_TOKEN", TOKEN)
    with serving(limits=Limits(token=TOKEN)) as url:
        assert remote(url, token_env="GERL_TEST_TOKEN")(IMAGES, *ROWS)["red"] == [0.0, 10.0, 20.0, 30.0, 40.0]
        monkeypatch.setenv("GERL_TEST_TOKEN", "another")
        with pytest.raises(RewardError, match=r"answered 401 .*the token of token_env=GERL_TEST_TOKEN is rejected"):
            remote(url, token_env="GERL_TEST_TOKEN")(IMAGES, *ROWS)
        with pytest.raises(RewardError, match="the service requires a token"):
            remote(url)(IMAGES, *ROWS)


def test_a_body_too_large_is_refused_however_it_comes() -> None:
    scorer = Red()
    with serving(scorer, Limits(max_body_mb=1)) as url:
        large = json.dumps(body(prompts=["x" * 1_500_000])).encode()
        answer = post(url, large)
        assert answer.status_code == 413 and "at most 1 MB are allowed" in answer.json()["error"]
        chunks = (large[i : i + 65536] for i in range(0, len(large), 65536))  # without Content-Length
        headers = {"Content-Type": "application/json"}
        answer = requests.post(f"{url}/v1/score", chunks, headers=headers, timeout=10)
        assert answer.status_code == 413 and "at most 1 MB are allowed" in answer.json()["error"]
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
        assert "more than 2 requests per minute" in answers[2].json()["error"]
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
    monkeypatch.setattr("gerl.web.server.BODY", 0.3)
    monkeypatch.setattr("gerl.web.server.RATE", 1e12)
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
        assert "at most 1 MB are allowed together" in answer.json()["error"]
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
