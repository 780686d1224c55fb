import email.utils
import gzip
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from http_service import Answer, Asked, HttpService, picture, serving
from PIL import Image

from gerl.errors import RewardError
from gerl.rewards.scorers.http import MAX_ANSWER, Client, HttpScorer, at_most, check_url, png_base64

SECRET = "sk-very-secret-482"
GOOD = Answer({"ok": 1})


class Asking(HttpScorer):
    """A scorer of which only the client is used here."""

    def __call__(self, *_: object) -> list[float]:
        raise AssertionError("it has nothing to score with")


def quick(**kwargs: Any) -> HttpScorer:
    return Asking(**{"timeout": 5.0, "backoff": 0.01, "retries": 3, **kwargs})


@contextmanager
def asking(*answers: Answer | Callable[[Asked], Answer], **kwargs: Any) -> Iterator[tuple[HttpService, Client]]:
    """A service with these answers, and a client of it with the scorer's `kwargs`."""
    with serving(*answers) as service, quick(**kwargs).client(service.url) as client:
        yield service, client


def test_a_right_answer_takes_one_request_with_json_both_ways() -> None:
    with serving(GOOD) as service, quick().client(service.url + "/v1/") as client:
        assert client.post("/score", {"a": ["ä", 1.5]}) == {"ok": 1}
    (asked,) = service.asked
    assert (asked.method, asked.path, asked.json) == ("POST", "/v1/score", {"a": ["ä", 1.5]})
    assert "Authorization" not in asked.headers and asked.headers["Content-Type"] == "application/json"


@pytest.mark.parametrize(
    "trouble",
    [
        *(Answer({}, status) for status in (408, 429, 500, 502, 503, 504)),
        Answer({}, 503, {"Retry-After": "soon"}),
        Answer(drop=True),
        Answer(b'{"ok"', headers={"Content-Length": "100", "Connection": "close"}),
        Answer(delay=1.0),
    ],
)
def test_a_passing_trouble_is_asked_again(trouble: Answer) -> None:
    with asking(trouble, GOOD, timeout=0.5) as (service, client):
        assert client.post("/", {}) == {"ok": 1}
    assert len(service.asked) == 2


@pytest.mark.parametrize(
    ("answer", "remedy"),
    [
        (
            Answer({}, 307, {"Location": "http://127.0.0.1:1/elsewhere"}),
            r"it redirects to, 'http://127\.0\.0\.1:1/else",
        ),
        (Answer({}, 400), "correct the kwargs"),
        (Answer({}, 401), "token_file to its file or token_env to its environment variable"),
        (Answer({}, 403), "token_file to its file or token_env to its environment variable"),
        (Answer({}, 404), "correct the address"),
        (Answer({}, 413), "lower image_size"),
        (Answer({}, 422), "correct the kwargs"),
        (Answer({}, 429, {"Retry-After": "3600"}), "3600 s"),
        *((Answer(body), "without JSON") for body in (b'{"a": ', b"<html>busy</html>", b"", b"\xff\xfe\xfa")),
        *((Answer(body), "without JSON") for body in (b"[" * 10**5, b'{"a":' * 10**5, b"1" * 5000)),
    ],
)
def test_a_refusal_is_not_repeated_and_says_what_to_do(answer: Answer, remedy: str) -> None:
    with asking(answer, GOOD) as (service, client), pytest.raises(RewardError, match=remedy) as error:
        client.post("/v1/score", {})
    assert len(service.asked) == 1
    assert f"POST {service.url}/v1/score answered {answer.status} " in str(error.value)


def test_of_a_long_answer_the_beginning_is_shown() -> None:
    with asking(Answer({"detail": "x" * 300}, 400)) as (_, client), pytest.raises(RewardError) as error:
        client.post("/", {})
    assert "x" * 180 in str(error.value) and "x" * 200 not in str(error.value)


def test_trouble_that_stays_is_reported_after_all_attempts() -> None:
    with (
        asking(Answer({"why": "no memory"}, 503), retries=2) as (service, client),
        pytest.raises(RewardError, match=r"503 .*no memory.*log of the service \(3 att"),
    ):
        client.post("/", {})
    assert len(service.asked) == 3


def test_waits_double() -> None:
    with asking(Answer({}, 500), Answer({}, 500), GOOD, backoff=0.1) as (_, client):
        start = time.perf_counter()
        client.post("/", {})
        assert 0.75 * 0.3 <= time.perf_counter() - start < 1.5


@pytest.mark.parametrize("date", [False, True])
def test_retry_after_is_honoured(date: bool) -> None:
    # A date has whole seconds: two of them ahead is at least one.
    value = email.utils.formatdate(time.time() + 2, usegmt=True) if date else "1"
    with asking(Answer({}, 429, {"Retry-After": value}), GOOD) as (service, client):
        start = time.perf_counter()
        assert client.post("/", {}) == {"ok": 1}
        assert 0.9 <= time.perf_counter() - start < 3
    assert len(service.asked) == 2


def test_a_slow_answer_times_out() -> None:
    with (
        asking(Answer(delay=1.0), timeout=0.1, retries=1) as (_, client),
        pytest.raises(RewardError, match=r"raise timeout.*\(2 attempts\)"),
    ):
        client.post("/", {})


def test_blanks_that_keep_the_line_open_do_not_defer_the_time_out() -> None:
    trickle = Answer(b" ", pieces=(b" ",) * 20, delay=0.1)
    with asking(trickle, timeout=0.4, retries=0) as (_, client):
        start = time.perf_counter()
        with pytest.raises(RewardError, match=r"within 0\.4 s"):
            client.post("/", {})
        assert time.perf_counter() - start < 1.5


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    "raw",
    [
        [bytes([byte]) for byte in HEAD],
        [HEAD + b"Content-Length: 100\r\n\r\n", *[b" "] * 40],
        [HEAD + b"Connection: close\r\n\r\n", *[b" "] * 40],
        [b"HTTP/1.1 100 Continue\r\n\r\n"] * 40,
    ],
    ids=["header", "body", "body without length", "continue"],
)
def test_a_service_that_drips_has_no_more_time_than_one_that_is_silent(raw: list[bytes]) -> None:
    with asking(Answer(raw=raw, delay=0.1), timeout=0.4, retries=0) as (_, client):
        start = time.perf_counter()
        with pytest.raises(RewardError, match=r"no answer within 0\.4 s.*timeout"):
            client.post("/", {})
        assert time.perf_counter() - start < 2


def test_a_connection_kept_open_is_watched_again() -> None:
    drip = Answer(raw=[bytes([byte]) for byte in HEAD], delay=0.1)
    with asking(GOOD, drip, timeout=0.4, retries=0) as (service, client):
        assert client.post("/", {}) == {"ok": 1}
        start = time.perf_counter()
        with pytest.raises(RewardError, match=r"no answer within 0\.4 s"):
            client.post("/", {})
        assert time.perf_counter() - start < 2
    assert len(service.asked) == 2


def test_a_proxy_has_no_more_time_either(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(Answer(raw=[bytes([byte]) for byte in HEAD], delay=0.1)) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        start = time.perf_counter()
        with (
            quick(timeout=0.4, retries=0).client("http://judge.invalid") as client,
            pytest.raises(RewardError, match=r"no answer within 0\.4 s"),
        ):
            client.post("/", {})
        assert time.perf_counter() - start < 2


def test_an_answer_without_end_is_read_to_the_limit_and_not_asked_again() -> None:
    def endless() -> Iterator[bytes]:
        yield HEAD + b"\r\n"
        for _ in range(4 * MAX_ANSWER >> 20):
            yield b" " * (1 << 20)

    with asking(Answer(raw=endless(), delay=0.001), timeout=30.0) as (service, client):
        with pytest.raises(RewardError, match=r"answered with more than 16 MB.*log of the service"):
            client.post("/", {})
        assert len(service.asked) == 1


def test_an_answer_that_grows_when_unpacked_is_refused_unread() -> None:
    packed = Answer(gzip.compress(b" " * 10**6), headers={"Content-Encoding": "gzip"})
    with asking(packed) as (service, client), pytest.raises(RewardError, match=r"Content-Encoding 'gzip'.*disable"):
        client.post("/", {})
    assert [asked.headers["Accept-Encoding"] for asked in service.asked] == ["identity"]


@pytest.mark.parametrize("wait", ["9" * 400, "9" * 5000, "Mon, 01 Jan 0001 00:00:00 GMT", "\u00b2"])
def test_an_impossible_wait_is_no_crash(wait: str) -> None:
    answer = Answer({}, 503, {"Retry-After": wait})
    with asking(answer, retries=0) as (_, client), pytest.raises(RewardError, match="answered 503"):
        client.post("/", {})


def test_an_answer_in_pieces_is_put_together() -> None:
    with asking(Answer(b'{"a"', pieces=(b": 1", b"}"))) as (_, client):
        assert client.post("/", {}) == {"a": 1}


def test_a_service_that_comes_back_on_its_port_is_found_again() -> None:
    with asking(GOOD, backoff=0.1, retries=6) as (service, client):
        service.stop()
        back = threading.Timer(0.3, service.start)
        back.start()
        assert client.post("/", {}) == {"ok": 1}
        back.join()


def test_a_service_that_is_not_there_is_named_with_the_cause() -> None:
    with serving(GOOD) as service:
        service.stop()
        message = r"POST http://127.*ConnectionRefusedError.*start the service.*\(2 attempts"
        with quick(retries=1).client(service.url) as client, pytest.raises(RewardError, match=message):
            client.post("/health", {})


def test_requests_run_in_parallel_up_to_the_limit_and_results_keep_their_order() -> None:
    everyone = threading.Barrier(4, timeout=5)  # broken unless four requests are open at a time

    def answer(asked: Asked) -> Answer:
        everyone.wait()
        return Answer(asked.json["i"] * 10, delay=0.02 * (7 - asked.json["i"]))

    with asking(answer, concurrency=4) as (service, client):
        assert client.map(lambda i: client.post("/", {"i": i}), range(8)) == [i * 10 for i in range(8)]
    assert service.most_in_flight == 4


def test_the_first_failure_is_raised_at_once_and_ends_what_waits() -> None:
    def answer(asked: Asked) -> Answer:
        return Answer({}, 400) if asked.json["i"] == 1 else Answer({}, 503)

    with asking(answer, concurrency=2, backoff=30.0) as (service, client):
        start = time.perf_counter()
        with pytest.raises(RewardError, match="answered 400"):
            client.map(lambda i: client.post("/", {"i": i}), range(20))
        assert time.perf_counter() - start < 5
    time.sleep(0.1)
    assert {asked.json["i"] for asked in service.asked} <= {0, 1, 2}


@pytest.mark.parametrize("kind", ["file", "env"])
def test_the_token_is_sent_and_shown_nowhere(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "token").write_text(SECRET + "\n")
    monkeypatch.setenv("JUDGE_TOKEN", SECRET)
    token = {"token_file": str(tmp_path / "token")} if kind == "file" else {"token_env": "JUDGE_TOKEN"}

    def echo(asked: Asked) -> Answer:
        return Answer({"sent": asked.headers["Authorization"]}, int(asked.path[1:]), {"Location": SECRET})

    scorer = quick(**token, retries=1)
    with serving(echo) as service, scorer.client(service.url) as client:
        for status in (401, 503, 307):
            with pytest.raises(RewardError) as error:
                client.post(f"/{status}", {})
            assert SECRET not in str(error.value) and SECRET not in repr(error.value)
            if status == 401:
                (name,) = token.values()
                assert f"{name} is rejected, correct it" in str(error.value)
                assert "Bearer [token]" in str(error.value)
    assert {asked.headers["Authorization"] for asked in service.asked} == {f"Bearer {SECRET}"}
    assert SECRET not in repr(scorer) + caplog.text and "attempt 1" in caplog.text


def test_a_renewed_token_file_is_read_at_the_next_call(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("old")
    scorer = quick(token_file=str(file))
    with serving(GOOD) as service:
        for token in ("old", "new"):
            file.write_text(token)
            with scorer.client(service.url) as client:
                client.post("/", {})
    assert [asked.headers["Authorization"] for asked in service.asked] == ["Bearer old", "Bearer new"]


def test_a_missing_or_impossible_token_is_an_error_when_the_scorer_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JUDGE_TOKEN", raising=False)
    with pytest.raises(RewardError, match=r"token_env=JUDGE_TOKEN .* not set; export it"):
        quick(token_env="JUDGE_TOKEN")
    with pytest.raises(RewardError, match=r"token_file=.*none cannot be read \(FileNotFoundError\)"):
        quick(token_file=str(tmp_path / "none"))
    with pytest.raises(RewardError, match="both given"):
        quick(token_env="JUDGE_TOKEN", token_file="x")
    for text in ("", f"{SECRET} two", f"{SECRET}\nX-Header: 1", f"{SECRET}ü"):
        monkeypatch.setenv("JUDGE_TOKEN", text)
        with pytest.raises(RewardError, match="token_env=JUDGE_TOKEN holds no token") as error:
            quick(token_env="JUDGE_TOKEN")
        assert SECRET not in str(error.value)


def test_a_netrc_password_is_never_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "netrc").write_text("machine judge.invalid login me password pass")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with serving(GOOD) as proxy, quick().client("http://judge.invalid") as client:  # a service on another machine
        monkeypatch.setenv("http_proxy", proxy.url)
        client.post("/", {})
    assert "Authorization" not in proxy.asked[0].headers


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_proxy_of_the_environment_is_not_asked_for_this_machine(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(GOOD) as proxy, serving(Answer({"direct": 1})) as service:
        monkeypatch.setenv("http_proxy", proxy.url)
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        with quick().client(service.url.replace("127.0.0.1", host)) as client:
            assert client.post("/", {}) == {"direct": 1}
        with quick().client("http://judge.invalid") as client:
            assert client.post("/health", {}) == {"ok": 1}
    assert [asked.path for asked in proxy.asked] == ["http://judge.invalid/health"]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("127.0.0.1:8000", "is not an address"),
        ("ftp://host/x", "is not an address"),
        ("http://", "is not an address"),
        ("http://host:port", "is not an address"),
        ("http://a b", "is not an address"),
        (f"http://me:{SECRET}@host", "contains a password"),
        (f"http://host/v1?key={SECRET}", "has a part after its path"),
        (f"http://host/v1#{SECRET}", "has a part after its path"),
    ],
)
def test_an_address_that_cannot_work_is_refused_without_showing_a_secret(url: str, message: str) -> None:
    with pytest.raises(RewardError, match=f"base_url.*{message}") as error:
        check_url("base_url", url)
    assert SECRET not in str(error.value)
    check_url("base_url", "https://host.example:8000/v1")


def test_images_travel_without_loss_and_shrink_in_proportion() -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (30, 60, 3), dtype=np.uint8))
    back = picture(png_base64(noise))
    assert back.format == "PNG" and np.array_equal(np.asarray(back), np.asarray(noise))
    assert at_most(noise, None) is noise and at_most(noise, 60) is noise
    assert at_most(noise, 20).size == (20, 10)
    assert at_most(noise.convert("P"), 1).size == (1, 1)
    assert at_most(Image.new("RGB", (8, 8), (9, 8, 7)), 2).getpixel((1, 1)) == (9, 8, 7)
