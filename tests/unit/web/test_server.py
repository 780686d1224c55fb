"""Connections on which nothing is asked, against a real server."""

import contextlib
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import uvicorn

from gerl.web import server as http_server
from gerl.web.server import Connection, Gate, Queue, Visit


async def plain(scope: Any, receive: Any, send: Any) -> None:
    if scope["path"] == "/busy":
        time.sleep(0.2)  # the loop waits, too
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


app = Gate(plain, lambda request: Visit(request.scope["path"], 4_000_000), local=True, queue=Queue(most=1))


@pytest.fixture
def port() -> Iterator[int]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, http=Connection, log_level="critical", lifespan="off"))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield listener.getsockname()[1]
    server.should_exit = server.force_exit = True
    thread.join(10)
    listener.close()


def connected(port: int, text: str) -> socket.socket:
    opened = socket.create_connection(("127.0.0.1", port), timeout=20)
    opened.sendall(text.encode())
    return opened


def half_open(port: int) -> socket.socket:
    return connected(port, "GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n")


def half_sent(port: int) -> socket.socket:
    """A request that promises a body, with its first byte."""
    head = "POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 4000000\r\n\r\n{"
    return connected(port, head)


def post(port: int) -> int:
    return requests.post(f"http://127.0.0.1:{port}/", json={}, timeout=20).status_code


def answer(opened: socket.socket) -> bytes:
    """What comes until the body of two bytes is there: head and body may arrive one after the other."""
    found = b""
    while not found.partition(b"\r\n\r\n")[2][1:] and (more := opened.recv(1000)):
        found += more
    return found


def is_closed(opened: socket.socket) -> bool:
    with contextlib.suppress(ConnectionResetError):
        return opened.recv(100) == b""
    return True


def test_a_head_that_does_not_arrive_ends_its_connection_and_no_other(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "HEAD", 0.3)
    with requests.Session() as session, half_open(port) as opened:
        assert session.get(f"http://127.0.0.1:{port}/", timeout=20).text == "ok"
        assert is_closed(opened)
        assert session.get(f"http://127.0.0.1:{port}/", timeout=20).text == "ok"  # the connection is kept
        with socket.create_connection(("127.0.0.1", port), timeout=20) as second:
            second.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert answer(second).endswith(b"ok")
            second.sendall(b"GET / HTTP")  # of the next request
            assert is_closed(second)


def test_of_too_many_connections_those_are_closed_that_wait_longest(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "most", lambda: 10)
    opened = [half_open(port) for _ in range(30)]
    try:
        assert requests.get(f"http://127.0.0.1:{port}/", timeout=20).text == "ok"
        assert is_closed(opened[0])
    finally:
        for one in opened:
            one.close()


def test_bodies_that_do_not_arrive_take_no_place_of_others(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "most", lambda: 10)
    opened = [half_sent(port) for _ in range(30)]
    try:
        assert requests.get(f"http://127.0.0.1:{port}/", timeout=20).text == "ok" and post(port) == 200
        assert is_closed(opened[0])
    finally:
        for one in opened:
            one.close()


def test_a_body_that_does_not_arrive_ends_its_request(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "BODY", 0.2)
    monkeypatch.setattr(http_server, "RATE", 1e12)
    monkeypatch.setattr(http_server, "DRAIN_SECONDS", 0.2)
    with half_sent(port) as opened:
        assert opened.recv(1000).startswith(b"HTTP/1.1 408 ")
        while not is_closed(opened):
            pass
    assert post(port) == 200


@pytest.mark.parametrize("attempt", range(6))
def test_of_connections_that_came_at_once_the_last_is_answered(
    attempt: int, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections accepted in the same millisecond have equal timers; the order of arrival decides."""
    monkeypatch.setattr(http_server, "most", lambda: 10)
    opened = [connected(port, "GET /busy HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")]
    try:
        time.sleep(0.05)  # what follows is accepted at one time of the loop
        opened += [half_open(port) for _ in range(30)]
        opened.append(connected(port, "GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"))
        assert answer(opened[-1]).endswith(b"ok")
        assert is_closed(opened[1])
    finally:
        for one in opened:
            one.close()


def test_as_many_connections_as_the_process_may_have_files(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, most in ((1024, 960), (64, 8), (10**6, 1000), (http_server.resource.RLIM_INFINITY, 1000)):
        monkeypatch.setattr(http_server.resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert http_server.most() == most


def test_every_server_has_the_gate() -> None:
    root = Path(http_server.__file__).parents[2]
    sources = [path for folder in ("gerl", "reward_models") for path in (root / folder).rglob("*.py")]
    servers = {path: text for path in sources if re.search(r"\b(Starlette|FastAPI)\(", text := path.read_text())}
    assert len(servers) == 5 and [path for path, text in servers.items() if not re.search(r"\(Gate, ", text)] == []
