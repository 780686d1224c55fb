"""Scoring of a request to a reward service: decode the images, score them in batches, check the scores.

A failure is a value, a `Refusal` with an HTTP status, so that it travels between processes like a score.
"""

import copy
import io
import logging
import math
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from PIL import Image

from gerl.errors import DataError, GerlError, RewardError
from gerl.rewards.scorers import Scorer
from gerl.rewards.scorers.base import JSON, Columns, Metadata, ReturnError
from gerl.rewards.worker import columns_of, number_of
from gerl.utils.condition_images import BROKEN

log = logging.getLogger(__name__)

FORMATS = ("PNG", "JPEG")
SHOWN = 500  # characters of a scorer's exception that an answer quotes
MEGAPIXEL = 10**6
WARM_PROMPT = 'a photo of a sign that reads "ready"'
WARM_SIZE = 256


@dataclass(frozen=True)
class Refusal:
    """Reason for missing scores: an HTTP status and one sentence."""

    status: int
    message: str


Row = dict[str, float] | Refusal  # the columns of one image


@dataclass(frozen=True)
class Item:
    """Image `index` of request number `request`."""

    request: int
    index: int
    image: Image.Image
    prompt: str
    metadata: Metadata


class Scoring(Protocol):
    """Interface to the running scorer, implemented by Ray Serve replicas (`reward_models.replicas`)."""

    async def score(self, images: list[bytes], prompts: list[str], metadata: list[Metadata]) -> Columns | Refusal:
        """Return the columns `[B]` for image files `[B]`, or the reason why there are none."""

    async def state(self) -> dict[str, JSON] | Refusal:
        """Return facts about the running scorer, or with status 503 the reason why it cannot score yet."""


@dataclass(frozen=True)
class ImageLimits:
    """Limits of a request: number of images, million pixels per image, and million pixels in total."""

    max_images: int = 256
    max_image_megapixels: int = 64
    max_megapixels: int = 256


def measure(images: Sequence[bytes], limits: ImageLimits) -> int | Refusal:
    """Return the number of pixels of PNG or JPEG files `[B]` from their headers, or a refusal.

    Checked before decoding, because a small file may decode to more than the memory holds.
    """
    if len(images) > limits.max_images:
        return Refusal(
            413,
            f"got {len(images)} images, at most {limits.max_images} are allowed: send fewer at a time, or start "
            "the service with a larger max_images",
        )
    pixels = 0
    for i, data in enumerate(images):
        try:
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                size = image.width * image.height
        except Image.DecompressionBombError:
            size = sys.maxsize
        except (*BROKEN, zlib.error):
            return Refusal(422, f"image {i} of {len(images)} is neither a PNG nor a JPEG file: send one of these")
        if size > limits.max_image_megapixels * MEGAPIXEL:
            return Refusal(
                413,
                f"image {i} of {len(images)} has too many pixels, more than {limits.max_image_megapixels} million: "
                "send a smaller one, or start the service with a larger max_image_megapixels",
            )
        pixels += size
        if pixels > limits.max_megapixels * MEGAPIXEL:
            return Refusal(
                413,
                f"images 0 to {i} of {len(images)} have more than {limits.max_megapixels} million pixels together: "
                "send fewer or smaller ones, or start the service with a larger max_megapixels",
            )
    return pixels


def decode(images: Sequence[bytes]) -> list[Image.Image] | Refusal:
    """Decode PNG or JPEG files `[B]` that `measure` admitted to RGB images `[B]`."""
    pictures = []
    for i, data in enumerate(images):
        try:
            image = Image.open(io.BytesIO(data), formats=FORMATS)
            image.load()
            # a conversion is a second copy: other modes drop the first copy before the next image is decoded
            pictures.append(image if image.mode == "RGB" else image.convert("RGB"))
        except (*BROKEN, zlib.error) as error:
            reason = " ".join(str(error).split())[:SHOWN]
            return Refusal(422, f"image {i} of {len(images)} is a broken file ({reason}): send the complete file")
    return pictures


def score_items(name: str, scorer: Scorer, items: list[Item]) -> list[Row]:
    """Score images of several requests in one batch; return one row each.

    If that fails, each request is scored separately, so that a faulty request cannot fail the others in its batch.
    """
    rows = _attempt(name, scorer, items)
    if not isinstance(rows, Refusal):
        return list(rows)
    requests = dict.fromkeys(item.request for item in items)
    if len(requests) == 1:
        return [rows] * len(items)
    log.warning("scorer %s failed for a batch of %d requests, scoring each individually", name, len(requests))
    alone = {r: iter(score_items(name, scorer, [item for item in items if item.request == r])) for r in requests}
    return [next(alone[item.request]) for item in items]


def join(name: str, rows: list[Row]) -> Columns | Refusal:
    """Join rows `[B]` into columns `[B]`, or return the first refusal."""
    good: list[dict[str, float]] = []
    for row in rows:
        if isinstance(row, Refusal):
            return row
        good.append(row)
    for row in good:
        if list(row) != list(good[0]):
            return Refusal(
                500,
                f"the scorer {name} returned the columns {', '.join(good[0])} and then {', '.join(row)}: they must "
                "be the same for every image",
            )
    return {column: [row[column] for row in good] for column in good[0]}


def warm_up(name: str, scorer: Scorer, prompt: str, metadata: Metadata) -> None:
    """Score a grey image, so that models are loaded before the first request; raises `RewardError` if it fails."""
    grey = Image.new("RGB", (WARM_SIZE, WARM_SIZE), (128, 128, 128))
    (row,) = score_items(name, scorer, [Item(0, 0, grey, prompt, metadata)])
    if isinstance(row, Refusal):
        raise RewardError(
            f"the warm-up of scorer {name} with the prompt {prompt!r} and metadata {metadata} failed: "
            f"{row.message}; set warm_prompt and warm_metadata to a row it can score, or warm_up=false"
        )


def _attempt(name: str, scorer: Scorer, items: list[Item]) -> list[dict[str, float]] | Refusal:
    try:
        returned = scorer(
            [item.image.copy() for item in items],
            [item.prompt for item in items],
            [copy.deepcopy(item.metadata) for item in items],
        )
        lists = columns_of(returned, name)
    except DataError as error:  # the request cannot be scored
        return Refusal(422, str(error))
    # the scorer may be user code and raise anything; the client receives a refusal
    except Exception as error:
        log.exception("scorer %s raised", name)
        what = str(error) if isinstance(error, GerlError | ReturnError) else f"{type(error).__name__}: {error}"
        return Refusal(500, f"the scorer {name} failed: {' '.join(what.split())[:SHOWN]}")
    for column, values in lists.items():
        if len(values) != len(items):
            return Refusal(
                500,
                f"the scorer {name} returned a list of length {len(values)} for {len(items)} images in {column}",
            )
    rows: list[dict[str, float]] = [{} for _ in items]
    for column, values in lists.items():
        for item, row, value in zip(items, rows, values, strict=True):
            number = number_of(value)
            if number is None or not math.isfinite(number):
                return Refusal(
                    500,
                    f"the scorer {name} returned {value!r:.80} for image {item.index} in column {column}, expected "
                    "a finite number: correct the scorer",
                )
            row[column] = number
    return rows
