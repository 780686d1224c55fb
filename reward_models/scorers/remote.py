"""Scorers that call gerl's reward services, including DeQA-Score."""

import json
import math
from dataclasses import dataclass
from typing import Annotated

from PIL import Image
from pydantic import Field

from gerl.errors import DataError, RewardError
from gerl.rewards.scorers.base import JSON, VERSION, Columns, Metadata
from gerl.rewards.worker import number_of
from reward_models.scorers.http import Client, HttpScorer, at_most, check_url, png_base64

# --- gerl's reward services: scorers with separate packages, GPU or machine
#
# JSON protocol: `POST {url}/v1/score` takes {"scorer": name, "images": [PNG in base64], "prompts": [text], "metadata":
# [object]}, each `[B]`, and returns {"scores": {column: [number]}, "version": "1"}, columns `[B]`, the first of which
# is the score. `GET {url}/v1/health` returns an object with the same version. Errors have a status of 400 or above.


@dataclass(frozen=True, kw_only=True)
class ServiceScorer(HttpScorer):
    """Base class that sends `batch_size` images per request to `url`, downscaled to at most `image_size` a side."""

    url: str
    batch_size: Annotated[int, Field(ge=1)] = 8
    image_size: Annotated[int, Field(ge=1)] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_url("url", self.url)

    def columns(self, scorer: str, images: list[Image.Image], prompts: list[str], metadata: list[Metadata]) -> Columns:
        """Return the columns `[B]` of the service's scorer `scorer`.

        Raises:
            RewardError: a request failed, or an answer does not have one finite number per image and column.
        """
        items = list(zip(images, prompts, metadata, strict=True))
        if not items:
            raise RewardError(f"the scorer {scorer} got no images: expected at least one")
        with self.client(self.url) as client:

            def ask(batch: list[tuple[Image.Image, str, Metadata]]) -> Columns:
                payload = {
                    "scorer": scorer,
                    "images": [png_base64(at_most(image, self.image_size)) for image, _, _ in batch],
                    "prompts": [prompt for _, prompt, _ in batch],
                    "metadata": [row for _, _, row in batch],
                }
                return checked_columns(client, client.post("/v1/score", payload), len(batch))

            parts = client.map(ask, [items[i : i + self.batch_size] for i in range(0, len(items), self.batch_size)])
        for part in parts:
            if list(part) != list(parts[0]):
                raise RewardError(
                    f"{self.url} returned the columns {', '.join(parts[0])} and then {', '.join(part)}: expected "
                    "the same for all images, correct the scorer there"
                )
        return {name: [score for part in parts for score in part[name]] for name in parts[0]}


@dataclass(frozen=True, kw_only=True)
class RemoteScorer(ServiceScorer):
    """All columns of the scorer named `scorer` of a reward service."""

    scorer: str

    def __call__(self, images: list[Image.Image], prompts: list[str], metadata: list[Metadata]) -> Columns:
        for prompt, row in zip(prompts, metadata, strict=True):
            _check_json(prompt, row)
        return self.columns(self.scorer, images, prompts, metadata)

    def check_prompt(self, prompt: str, metadata: Metadata) -> None:
        """Reject only metadata that cannot be sent; the service is not called, because it need not run yet."""
        _check_json(prompt, metadata)


def _check_json(prompt: str, metadata: Metadata) -> None:
    for name, value in metadata.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise DataError(
                f"{prompt!r} has {name}={value!r:.60}, which cannot be sent to a reward service as JSON ({error}): "
                "remove the column or write it as text or a finite number"
            ) from None


def checked_answer(client: Client, answer: JSON) -> dict[str, JSON]:
    """Return an answer that follows this protocol; raises `RewardError` otherwise."""
    if isinstance(answer, dict) and answer.get("version") == VERSION:
        return answer
    raise RewardError(
        f"{client.url} answered {client.quoted(answer)}, expected an object with version {VERSION!r}: give the "
        "address of a gerl reward service of the same release"
    )


def checked_columns(client: Client, answer: JSON, size: int) -> Columns:
    """Validate and return the columns `[size]` of an answer."""
    scores = checked_answer(client, answer).get("scores")
    if not isinstance(scores, dict) or not scores:
        raise RewardError(
            f"{client.url} answered {client.quoted(answer)}, expected scores by column: correct the service"
        )
    columns: Columns = {}
    for name, values in scores.items():
        if not name.isprintable():
            raise RewardError(
                f"{client.url} returned a column with the name {name!r:.80}, which cannot be shown: correct it there"
            )
        if not isinstance(values, list) or len(values) != size:
            count = f"a list of length {len(values)}" if isinstance(values, list) else f"a {type(values).__name__}"
            raise RewardError(
                f"{client.url} returned {count} for {size} images in column {name}: correct the scorer there"
            )
        for i, value in enumerate(values):
            number = None if isinstance(value, bool) else number_of(value)
            if number is None or not math.isfinite(number):
                raise RewardError(
                    f"{client.url} returned {client.quoted(value)} for image {i} of {size} in column {name}, "
                    "expected a finite number: correct the scorer there"
                )
            columns.setdefault(name, []).append(number)
    return columns


# --- DeQA-Score, an image quality model, behind a gerl reward service that offers it as `deqa`
#
# Source: "Teaching Large Language Models to Regress Accurate Image Quality Scores using Score Distribution" (arXiv
# 2501.11561); the scale is that of Flow-GRPO's reward code.

WORST, BEST = 1.0, 5.0
ROUNDING = 0.05  # of a mean over five levels in half precision


@dataclass(frozen=True, kw_only=True)
class DeqaScorer(ServiceScorer):
    """Image quality from 1 to 5, the first column of the scorer `deqa`, divided by 5; ignores the prompt."""

    def __call__(self, images: list[Image.Image], prompts: list[str], metadata: list[Metadata]) -> list[float]:
        qualities = next(iter(self.columns("deqa", images, prompts, [{} for _ in metadata]).values()))
        for i, quality in enumerate(qualities):
            # a service that already divides by 5 would otherwise go unnoticed
            if not WORST - ROUNDING <= quality <= BEST + ROUNDING:
                raise RewardError(
                    f"{self.url} gave image {i} of {len(images)} a quality of {quality:g}, expected {WORST:g} to "
                    f"{BEST:g}: configure its scorer deqa to return DeQA-Score's own number"
                )
        return [quality / BEST for quality in qualities]
