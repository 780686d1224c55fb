"""HTTP requests with a limit on the bytes and the total time of the answer."""

import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import requests

CONNECT_S = 10.0  # a reachable machine answers at once, however long it then computes


class UnreadableAnswer(Exception):
    """The answer exceeds a limit or is encoded; the message completes "answered with"."""


@dataclass(frozen=True)
class Answer:
    """Answer of a service; names of `headers` are case-insensitive."""

    status: int
    headers: Mapping[str, str]
    content: bytes

    @property
    def text(self) -> str:
        return self.content.decode(errors="replace")


def exchange(session: requests.Session, method: str, url: str, most: int, seconds: float, **given: Any) -> Answer:
    """Send a request and return its answer of at most `most` bytes, within `seconds` in total; follow no redirect.

    Raises `TimeoutError` or `requests.Timeout`, other errors of requests and urllib3, and `UnreadableAnswer`.
    """
    future: Future[Answer] = Future()

    def work() -> None:
        try:
            future.set_result(_exchange(session, method, url, most, seconds, given))
        except Exception as error:  # noqa: BLE001 - it is raised in the caller
            future.set_exception(error)

    # the time-outs of requests apply to each read: a service that sends a byte now and then never exceeds them
    threading.Thread(target=work, name="exchange", daemon=True).start()
    return future.result(seconds)


def _exchange(
    session: requests.Session, method: str, url: str, most: int, seconds: float, given: dict[str, Any]
) -> Answer:
    headers = {"Accept-Encoding": "identity"} | given.pop("headers", {})  # a small compressed answer could be large
    timeout = (min(CONNECT_S, seconds), seconds)
    # a redirected POST becomes a GET, and the token would be forwarded
    options = {"headers": headers, "timeout": timeout, "allow_redirects": False, "stream": True, **given}
    with session.request(method, url, **options) as response:
        coding = response.headers.get("Content-Encoding", "identity").strip().lower()
        if coding not in ("", "identity"):
            raise UnreadableAnswer(
                f"Content-Encoding {coding!r:.50}, which was not requested: disable compression in the service or "
                "its proxy"
            )
        content, until = bytearray(), time.monotonic() + seconds
        while chunk := response.raw.read1(1 << 16, decode_content=False):
            content += chunk
            if time.monotonic() > until:  # the caller has timed out
                raise TimeoutError
            if len(content) > most:
                raise UnreadableAnswer(
                    f"more than {most / 10**6:.0f} MB: correct the address, or check the log of the service"
                )
        return Answer(response.status_code, response.headers, bytes(content))
