"""What the tests of voting share: a voter who is a program, on the page's own requests, and services to vote at."""

import contextlib
import io
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import requests
from PIL import Image

from gerl.utils.serving import listen
from gerl.web.server import address
from reward_models.votes.ballots import Ballots, Rules, VoteRequest
from reward_models.votes.service import Tokens, voting

Choose = Callable[[list[Image.Image]], list[int]]


def redness(image: Image.Image) -> float:
    """How much more red than other colours an image has, on average."""
    red, green, blue = np.moveaxis(np.asarray(image.convert("RGB"), np.float64), -1, 0) / 255
    return float((red - (green + blue) / 2).mean())


def reddest(images: list[Image.Image]) -> list[int]:
    """Ranks by redness, the reddest first."""
    order = sorted(range(len(images)), key=lambda i: -redness(images[i]))
    return [order.index(i) + 1 for i in range(len(images))]


class Voter:
    """Votes at a link as the page does, by what `choose` says to the images, until `stop` is called."""

    def __init__(self, link: str, choose: Choose = reddest, pause: float = 0.0) -> None:
        self.link, self.choose, self.pause = link, choose, pause
        self.votes: list[str] = []  # ids of the groups
        self.over = threading.Event()
        self.session = requests.Session()
        self.thread = threading.Thread(target=self._vote, daemon=True)

    def __enter__(self) -> "Voter":
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join(20)

    def state(self) -> dict[str, Any]:
        """The state of the page."""
        with self.session.get(self.link + "events", stream=True, timeout=10) as response:
            response.raise_for_status()
            line = next(line for line in response.iter_lines() if line.startswith(b"data: "))
            return dict(json.loads(line.removeprefix(b"data: ")))

    def images(self, group: dict[str, Any]) -> list[Image.Image]:
        found = [self.session.get(self.link + path, timeout=10) for path in group["images"]]
        return [Image.open(io.BytesIO(each.content)) for each in found]

    def post(self, what: str, **body: Any) -> requests.Response:
        return self.session.post(self.link + what, json=body, timeout=10)

    def _vote(self) -> None:
        while not self.over.is_set():
            with contextlib.suppress(requests.RequestException):  # the service may be down for a while
                group = self.state()["group"]
                if group is not None:
                    time.sleep(self.pause)
                    if self.post("vote", group=group["id"], ranks=self.choose(self.images(group))).ok:
                        self.votes.append(group["id"])
                    continue
            self.over.wait(0.02)


@contextlib.contextmanager
def service(
    folder: Path, names: Sequence[str] = (), port: int = 0, host: str = "127.0.0.1", **rules: Any
) -> Iterator[tuple[str, Ballots, Tokens]]:
    """A vote service in this process: its URL, its state and its tokens."""
    tokens = Tokens.of(folder, host, names)
    ballots = Ballots(folder, Rules(**{"undo": 0, **rules}))
    listener = listen(host, port)
    url = address(listener, "127.0.0.1")
    with voting(listener, ballots, tokens):
        yield url, ballots, tokens


def group(number: int = 1, step: int = 1, together: Sequence[int] = (), images: int = 3, drawn: int = 0) -> VoteRequest:
    """A group as a run describes it; `drawn` anew its images are others."""
    key = f"{step:08x}{number:08x}"
    return VoteRequest(
        key=key,
        run="signs/now",
        step=step,
        prompt=number,
        seeds=list(range(images)),
        digests=[f"{drawn:08x}{number:08x}{i:08x}" for i in range(images)],
        together=[f"{step:08x}{other:08x}" for other in together or [number]],
    )


def pngs(count: int = 3) -> list[bytes]:
    """Files of images from black to red."""
    files = []
    for i in range(count):
        buffer = io.BytesIO()
        Image.new("RGB", (96, 64), (round(255 * i / max(count - 1, 1)), 20, 20)).save(buffer, "PNG")
        files.append(buffer.getvalue())
    return files
