"""What the tests of the reward services share: a scorer, its service over a socket, and requests to it."""

import asyncio
import base64
import json
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import requests
import uvicorn
from PIL import Image

from gerl.errors import DataError
from gerl.rewards.scorers import Scorer
from reward_models.app import Limits, build_app
from reward_models.scorers.http import png_base64
from reward_models.scorers.remote import RemoteScorer
from reward_models.scoring import Columns, Item, Refusal, decode, join, score_items

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
