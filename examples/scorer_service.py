"""A reward of your own as a service, for an environment in which gerl cannot be installed: Python 3.8 and Pillow do.

Put your model into `load` and `score`, start it in the environment of the model, and name its address in the run:

python examples/scorer_service.py --port 8100
python -m gerl.trainer.main_flowgrpo \
    'reward.scorers={remote: {kwargs: {url: "http://127.0.0.1:8100", scorer: saturation}}}'

Where gerl can be installed, `python -m reward_models.serve` does the same with replicas, batches and limits.
"""

from __future__ import annotations  # for Python 3.8

import argparse
import base64
import contextlib
import hmac
import io
import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from PIL import Image, ImageStat

NAME = "saturation"
VERSION = "1"  # of the protocol; gerl refuses another
MAX_BODY = 64 * 10**6  # bytes of a request
MAX_PIXELS = 64 * 10**6  # of the images of a request together
MAX_REQUESTS = 4  # at a time; others are asked to come back


def load() -> Any:
    """The model, loaded once before the first request."""
    return None


def score(
    model: Any, images: list[Image.Image], prompts: list[str], metadata: list[dict[str, Any]]
) -> dict[str, list[float]]:
    """Columns by name, one number per image; the first column is the score. Raise for what cannot be scored."""
    hsv = [ImageStat.Stat(image.convert("HSV")).mean for image in images]
    return {NAME: [s / 255 for _, s, _ in hsv], "value": [v / 255 for _, _, v in hsv]}


class Handler(BaseHTTPRequestHandler):
    """Answers JSON to `GET /v1/health` and `POST /v1/score`."""

    model: Any = None
    token = ""
    lock = threading.Lock()  # one request at a time has the model, and its images in memory
    places = threading.BoundedSemaphore(MAX_REQUESTS)
    timeout = 60  # seconds for a piece of a request to come

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):  # the client is gone
            super().handle()

    def finish(self) -> None:
        with contextlib.suppress(ConnectionError):
            super().finish()

    def do_GET(self) -> None:
        if self.path == "/v1/health":
            self.answer(200, {"status": "live", "scorers": [NAME]})
        else:
            self.answer(404, {"error": "there is no " + self.path})

    def do_POST(self) -> None:
        refusal = self.refusal()  # before any of the body is read
        if refusal is None and not self.places.acquire(blocking=False):
            refusal = 429, "too many requests: send fewer at a time"
        if refusal is not None:
            self.close_connection = True
            self.answer(refusal[0], {"error": refusal[1]})
            return
        try:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.answer(*self.scored(body))
        finally:
            self.places.release()

    def refusal(self) -> tuple[int, str] | None:
        """Status and sentence for a request whose head already says that it cannot be answered."""
        given = self.headers.get("Authorization", "")
        if self.token and not hmac.compare_digest(given.encode(), ("Bearer " + self.token).encode()):
            return 401, "another token is wanted"
        if self.path != "/v1/score":
            return 404, "there is no " + self.path
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()):
            return 411, "the length of the body is wanted in Content-Length"
        if len(length) > 12 or int(length) > MAX_BODY:
            return 413, f"at most {MAX_BODY} bytes may come"
        return None

    def scored(self, body: bytes) -> tuple[int, dict[str, Any]]:
        try:
            asked = json.loads(body)
            if asked["scorer"] != NAME:
                return 404, {"error": "there is only the scorer " + NAME}
            files = [io.BytesIO(base64.b64decode(text, validate=True)) for text in asked["images"]]
            prompts, metadata = asked["prompts"], asked["metadata"]
            if not len(files) == len(prompts) == len(metadata):
                return 422, {"error": "one prompt and one metadata an image are wanted"}
            opened = [Image.open(file, formats=("PNG", "JPEG")) for file in files]  # reads only their heads
            if sum(image.width * image.height for image in opened) > MAX_PIXELS:
                return 413, {"error": f"the images have too many pixels: at most {MAX_PIXELS} may come"}
        except Image.DecompressionBombError:
            return 413, {"error": f"an image has too many pixels: at most {MAX_PIXELS} may come"}
        except (ValueError, KeyError, TypeError, OSError, SyntaxError, RecursionError) as error:
            return 422, {"error": f"the request cannot be read: {error}"}
        with self.lock:
            try:
                images = [image.convert("RGB") for image in opened]
            except (ValueError, OSError, SyntaxError) as error:
                return 422, {"error": f"an image is broken: {error}"}
            try:
                return 200, {"scores": score(self.model, images, prompts, metadata)}
            except Exception as error:  # noqa: BLE001 - whatever your model raises is told to whoever asked
                return 500, {"error": f"{type(error).__name__}: {error}"}

    def answer(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps({**content, "version": VERSION}).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8100)
    parser.add_argument("--token-env", help="environment variable with the token that clients must send")
    options = parser.parse_args()
    Handler.model = load()
    Handler.token = os.environ[options.token_env] if options.token_env else ""
    server = ThreadingHTTPServer((options.host, options.port), Handler)
    print(f"http://{options.host}:{server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
