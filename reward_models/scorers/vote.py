"""Human feedback as reward: images of a group are ranked in a vote service (`python -m gerl.vote`).

The protocol is that of reward services with two additions. `POST {url}/v1/score` takes {"scorer": "vote", "images":
[PNG in base64] [B] or [], "prompts": [text], "metadata": [{}], "group": {key, run, step, prompt, seeds [B], digests
[B], together}}, with images also "sources": [PNG of a condition image], if there are any. It returns 200 {"scores":
{"vote": [number]}, "version": "1"} once people have voted, before that 202 {"waiting": "images" | "votes",
"version": "1"}: images are sent on request. The client polls.

`POST {url}/v1/hello` returns {"scorers": ["vote"], "version": "1"} if the service is up and the token is correct.
"""

import hashlib
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

import numpy as np
from PIL import Image
from pydantic import Field

from gerl.errors import RewardError
from gerl.protocol import FeedbackRequest
from gerl.rewards.scorers.base import JSON, Metadata, PeopleScorer, Reference, read, references_of
from gerl.utils.condition_images import COLUMNS
from reward_models.scorers.http import Client, HttpScorer, Transient, at_most, check_url, png_base64, to_base64
from reward_models.scorers.remote import checked_answer, checked_columns

NAME = "vote"
FPS = 8.0  # of videos, which are shown as animated PNGs


@dataclass(frozen=True, kw_only=True)
class VoteScorer(PeopleScorer, HttpScorer):
    """Human ranking of the images of a group, from 1 for the best to 0 for the last, evenly spaced; ties share a value.

    If only the best was picked: 1 for it and 0 for the others. 0.5 for all if the group was skipped. The service is at
    `url`; images are sent downscaled to at most `image_size` a side. If the service does not answer, the run waits.

    `sources`: required columns of the row with images shown beside the samples, such as the source of an edit; by
    default `image`, `mask_image` and `control_image`, if present.
    """

    url: str
    image_size: Annotated[int, Field(ge=1)] | None = None
    fps: Annotated[float, Field(gt=0)] = FPS
    sources: list[str] | None = None
    timeout: Annotated[float, Field(gt=0)] = 30.0
    retries: Annotated[int, Field(ge=0)] = 0  # the service is polled anyway

    def __post_init__(self) -> None:
        super().__post_init__()
        check_url("url", self.url)

    def check_prompt(self, prompt: str, metadata: Metadata) -> None:
        self._sources(prompt, metadata)

    def _sources(self, prompt: str, metadata: Metadata) -> list[Reference]:
        named = [name for name in COLUMNS if metadata.get(name)] if self.sources is None else self.sources
        return [reference for name in named for reference in references_of(NAME, prompt, metadata, name)]

    @cached_property
    def _digests(self) -> dict[str, list[str]]:
        """Image digests of pending groups, by key, cached because asking is repeated."""
        return {}

    def ask(
        self, images: Callable[[], Sequence[Any]], prompt: str, metadata: Metadata, occasion: FeedbackRequest
    ) -> list[float] | str:
        """Return the scores of a group, "" if nobody has voted yet, or the problem if the service is unavailable."""
        if len(occasion.seeds) < 2:
            return [0.5]  # a single image has no ranking
        if occasion.key not in self._digests:
            self._digests[occasion.key] = [digest(image) for image in images()]
        group = {
            "key": occasion.key,
            "run": occasion.run,
            "step": occasion.step,
            "prompt": occasion.prompt,
            "seeds": list(occasion.seeds),
            "digests": self._digests[occasion.key],
            "together": list(occasion.together),
        }
        payload: dict[str, object] = {"scorer": NAME, "images": [], "prompts": [prompt], "metadata": [{}]}
        payload["group"] = group
        try:
            with self.client(self.url) as client:
                answer = checked_answer(client, client.post("/v1/score", payload))
                if answer.get("waiting") == "images":
                    payload |= self._files(images(), self._sources(prompt, metadata))
                    answer = checked_answer(client, client.post("/v1/score", payload))
                if "waiting" in answer:
                    return ""
                del self._digests[occasion.key]
                return _ranked(client, answer, len(occasion.seeds))
        except Transient as error:
            return f"{error}; the run waits"

    def _files(self, images: Sequence[Any], sources: Sequence[Reference]) -> dict[str, object]:
        """Return the encoded images of a request; sources are sent no larger than the samples."""
        files: dict[str, object] = {"images": [encoded(image, self.image_size, self.fps) for image in images]}
        if sources:
            first = images[0][0] if isinstance(images[0], list) else images[0]
            most = min(max(first.size), self.image_size or max(first.size))
            files["sources"] = [png_base64(at_most(read(source), most)) for source in sources]
        return files

    def reach(self) -> str:
        """Return "" if the service is up, else the problem; raises `RewardError` for a wrong service or token."""
        try:
            with self.client(self.url) as client:
                checked_answer(client, client.post("/v1/hello", {"scorer": NAME}))
        except Transient as error:
            return f"{error}; the run waits where it needs votes"
        return ""


def digest(image: Any) -> str:
    """Return a digest of the pixels of an image, or of the frames of a video."""
    hashed = hashlib.sha256()
    for frame in image if isinstance(image, list) else [image]:
        pixels = np.asarray(frame.convert("RGB"))
        hashed.update(repr(pixels.shape).encode())
        hashed.update(np.ascontiguousarray(pixels).tobytes())
    return hashed.hexdigest()[:32]


def encoded(image: Any, size: int | None, fps: float) -> str:
    """Encode an image as a PNG in base64, the frames of a video as an animated PNG."""
    if not isinstance(image, list):
        return png_base64(at_most(image, size))
    frames: list[Image.Image] = [at_most(frame, size).convert("RGB") for frame in image]
    buffer = io.BytesIO()
    frames[0].save(buffer, "PNG", save_all=True, append_images=frames[1:], duration=1000 / fps, loop=0)
    return to_base64(buffer.getvalue())


def _ranked(client: Client, answer: dict[str, JSON], count: int) -> list[float]:
    columns = checked_columns(client, answer, count)
    if NAME not in columns:
        raise RewardError(f"{client.url} gave the columns {', '.join(columns)}, expected {NAME}: correct the address")
    return columns[NAME]
