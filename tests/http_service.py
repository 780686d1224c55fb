"""A real HTTP service on this machine whose answers a test chooses, and which counts what it is asked."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Answer:
    """`body` is sent as it is if bytes, else as JSON, `delay` seconds late; `drop` closes the connection instead.

    `pieces` are sent after it one by one, chunked, each after `delay` seconds.
    """

    body: Any = field(default_factory=dict)
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    delay: float = 0.0
    drop: bool = False
    pieces: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class Asked:
    """A request as it arrived."""

    method: str
    path: str
    headers: dict[str, str]
    json: Any


class HttpService:
    """Answers requests with `answer(asked)`; `asked` has them all, `most_in_flight` how many were open at a time."""

    def __init__(self, answer: Callable[[Asked], Answer]) -> None:
        self.answer = answer
        self.asked: list[Asked] = []
        self.most_in_flight = 0
        self._in_flight = 0
        self._lock = threading.Lock()
        self._server: ThreadingHTTPServer | None = None
        self._port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Listen; after a stop, on the port of before."""
        service = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                service._handle(self)

            def do_POST(self) -> None:
                service._handle(self)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), Handler)
        self._server.daemon_threads = True
        self._port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        """Listen no more: connections are refused."""
        if self._server is not None:
            self._server.shutdown()
            self._server.socket.close()
            self._server = None

    def _handle(self, handler: BaseHTTPRequestHandler) -> None:
        raw = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        asked = Asked(handler.command, handler.path, dict(handler.headers.items()), json.loads(raw) if raw else None)
        with self._lock:
            self.asked.append(asked)
            self._in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self._in_flight)
        try:
            answer = self.answer(asked)
            time.sleep(answer.delay)
        finally:
            with self._lock:
                self._in_flight -= 1
        with suppress(BrokenPipeError, ConnectionResetError):  # the client had waited long enough
            _send(handler, answer)
        handler.close_connection = handler.close_connection or answer.drop


def _send(handler: BaseHTTPRequestHandler, answer: Answer) -> None:
    if answer.drop:
        return
    body = answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
    handler.send_response(answer.status)
    for name, value in answer.headers.items():
        handler.send_header(name, value)
    if not answer.pieces:
        if "Content-Length" not in answer.headers:
            handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)
        return
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    for piece in (body, *answer.pieces):
        handler.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
        time.sleep(answer.delay)
    handler.wfile.write(b"0\r\n\r\n")


def in_turn(*answers: Answer) -> Callable[[Asked], Answer]:
    """The answers one after the other, then the last one for ever."""
    left = iter(answers[:-1])
    lock = threading.Lock()

    def answer(asked: Asked) -> Answer:
        with lock:
            return next(left, answers[-1])

    return answer


@contextmanager
def serving(*answers: Answer | Callable[[Asked], Answer]) -> Iterator[HttpService]:
    """A running service with one function that answers, or with answers given in turn."""
    match answers:
        case (function,) if not isinstance(function, Answer):
            service = HttpService(function)
        case _:
            service = HttpService(in_turn(*(answer for answer in answers if isinstance(answer, Answer))))
    try:
        yield service
    finally:
        service.stop()
