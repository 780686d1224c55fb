"""A real HTTP service on this machine whose answers a test chooses, and which counts what it is asked."""

import base64
import io
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from PIL import Image


@dataclass(frozen=True)
class Answer:
    """`body` is sent as it is if bytes, else as JSON, `delay` seconds late; `drop` closes the connection instead.

    `pieces` are sent after it one by one, chunked, each after `delay` seconds. `raw` is sent instead of all this, piece
    by piece as it is, each after `delay` seconds, and then the connection closed.
    """

    body: Any = field(default_factory=dict)
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    delay: float = 0.0
    drop: bool = False
    pieces: tuple[bytes, ...] = ()
    raw: Iterable[bytes] = ()


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
        self.most_in_flight = self._in_flight = self._port = 0
        self._lock = threading.Lock()
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Listen; after a stop, on the port of before."""
        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), partial(_Handler, self))
        self._server.daemon_threads = True
        self._port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        """Listen no more: connections are refused."""
        self._server.shutdown()
        self._server.socket.close()

    def handle(self, handler: BaseHTTPRequestHandler) -> None:
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
        handler.close_connection = handler.close_connection or answer.drop or bool(answer.raw)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, service: HttpService, *connection: Any) -> None:
        self.service = service
        super().__init__(*connection)

    def do_POST(self) -> None:
        self.service.handle(self)

    do_GET = do_POST

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _send(handler: BaseHTTPRequestHandler, answer: Answer) -> None:
    if answer.drop:
        return
    if answer.raw:
        for piece in answer.raw:
            handler.wfile.write(piece)
            time.sleep(answer.delay)
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


@contextmanager
def serving(*answers: Answer | Callable[[Asked], Answer]) -> Iterator[HttpService]:
    """A running service that gives the answers, or asks the functions, one after the other, the last one for ever."""
    left = iter(answers[:-1])

    def answer(asked: Asked) -> Answer:
        given = next(left, answers[-1])
        return given if isinstance(given, Answer) else given(asked)

    service = HttpService(answer)
    try:
        yield service
    finally:
        service.stop()


def picture(text: str) -> Image.Image:
    """The image file in a request: base64, or a data URL of a PNG."""
    return Image.open(io.BytesIO(base64.b64decode(text.removeprefix("data:image/png;base64,"), validate=True)))


def scores(**columns: Any) -> Answer:
    """An answer of a reward service."""
    return Answer({"scores": columns, "version": "1"})


def judge_says(*texts: Any, finish: str = "stop", logprobs: Any = None) -> list[Answer]:
    """Answers of the chat completions API, one a text, with what a client may ignore."""
    choice = {"index": 0, "finish_reason": finish, "logprobs": logprobs}
    choices = [choice | {"message": {"role": "assistant", "content": text}} for text in texts]
    return [Answer({"id": "1", "object": "chat.completion", "choices": [one], "usage": {}}) for one in choices]


def judge_was_asked(asked: Asked) -> tuple[Image.Image, str]:
    """The image and the text of a request to the chat completions API."""
    (image,), text = judge_was_shown(asked)
    return image, text


def judge_was_shown(asked: Asked) -> tuple[list[Image.Image], str]:
    """The images and the text behind them of a request to the chat completions API."""
    *images, text = asked.json["messages"][0]["content"]
    assert {image["type"] for image in images} == {"image_url"} and text["type"] == "text"
    return [picture(image["image_url"]["url"]) for image in images], text["text"]
