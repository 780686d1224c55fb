"""HTTP interface of a reward service: a FastAPI application in front of a scorer.

Paths: `POST /v1/score` (the protocol of `reward_models.scorers.remote`), `GET /v1/health` (the process is live), `GET
/v1/ready` (the scorer is loaded), `GET /metrics` (Prometheus), `/docs` and `/openapi.json`. Errors are {"error":
sentence, "version": "1"}.
"""

import asyncio
import logging
from typing import Annotated, Literal, Self

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse, Response
from fastapi.security import HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, ConfigDict, FailFast, Field, model_validator
from starlette.exceptions import HTTPException

from gerl.config.schema import DEEPEST, is_flat
from gerl.errors import RewardError
from gerl.rewards.scorers.base import VERSION, Columns, Metadata, decode_base64
from reward_models.guard import BUSY, REASONS, SCORE, WAIT_SECONDS, Error, Guard, Limits, Metrics, Room, answer
from reward_models.scoring import MEGAPIXEL, Refusal, Scoring, measure

log = logging.getLogger(__name__)


class ScoreRequest(BaseModel):
    """Images to score, each with its prompt and the other columns of the prompt's row."""

    model_config = ConfigDict(extra="forbid")

    scorer: str = Field(description="name of the scorer of this service", examples=["ocr"])
    # validation stops at the first wrong entry: an error for each of millions would fill the memory
    images: Annotated[list[str], FailFast()] = Field(min_length=1, description="PNG or JPEG files in base64")
    prompts: Annotated[list[str], FailFast()]
    metadata: Annotated[list[Metadata], FailFast()]

    @model_validator(mode="after")
    def same_length(self) -> Self:
        if not len(self.images) == len(self.prompts) == len(self.metadata):
            raise ValueError(
                f"got {len(self.images)} images with {len(self.prompts)} prompts and {len(self.metadata)} "
                "metadata: send one of each per image"
            )
        for i, row in enumerate(self.metadata):
            if not is_flat(row):
                raise ValueError(f"metadata {i} has more than {DEEPEST} nested objects or lists: send fewer")
        return self


class ScoreResponse(BaseModel):
    """One list of scores per column, in the order of the images; the first column is the score."""

    scores: Columns
    version: str = VERSION


class Health(BaseModel):
    """Liveness of the process; see /v1/ready for the scorer."""

    status: Literal["live"] = "live"
    scorers: list[str]
    version: str = VERSION


class Ready(BaseModel):
    """Readiness of the scorer; additional keys describe where it runs."""

    model_config = ConfigDict(extra="allow")

    status: Literal["ready"] = "ready"
    version: str = VERSION


def build_app(name: str, scoring: Scoring, limits: Limits | None = None) -> FastAPI:
    """Build the application of the scorer `name`, which `scoring` runs."""
    limits = limits or Limits()
    app = FastAPI(
        title=f"gerl reward service: {name}",
        version=VERSION,
        description="Scores images for their prompts; higher is better.",
    )
    metrics = Metrics()
    room = Room(limits.max_in_flight_megapixels * MEGAPIXEL)
    app.add_middleware(Guard, limits=limits, metrics=metrics)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(Exception, _broken)
    # the guard checks the token before reading the body; this dependency only documents it in OpenAPI
    asks = [Depends(HTTPBearer(auto_error=False))] if limits.token is not None else []
    errors: dict[int | str, dict[str, object]] = {status: {"model": Error} for status in REASONS}

    @app.post(SCORE, responses=errors, dependencies=asks)
    async def score(request: ScoreRequest) -> ScoreResponse:
        """Score images."""
        if request.scorer != name:
            raise HTTPException(404, f"there is no scorer {request.scorer!r:.80} here, only {name}")
        images = await asyncio.to_thread(_decoded, request.images)
        pixels = await asyncio.to_thread(measure, images, limits)
        if isinstance(pixels, Refusal):
            raise _exception(pixels)
        async with room.hold(pixels, WAIT_SECONDS) as held:
            if not held:
                raise _exception(Refusal(429, BUSY))
            metrics.queue.inc(len(images))
            try:
                columns = await scoring.score(images, request.prompts, request.metadata)
            finally:
                metrics.queue.dec(len(images))
        if isinstance(columns, Refusal):
            raise _exception(columns)
        metrics.images.inc(len(images))
        return ScoreResponse(scores=columns)

    @app.get("/v1/health")
    async def health() -> Health:
        """Whether the process answers."""
        return Health(scorers=[name])

    @app.get("/v1/ready", responses={503: {"model": Error}})
    async def ready() -> Ready:
        """Whether the scorer is loaded and can score."""
        state = await scoring.state()
        if isinstance(state, Refusal):
            raise _exception(state)
        return Ready.model_validate(state)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def numbers() -> Response:
        """Metrics of this service in Prometheus text format."""
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return app


def _decoded(images: list[str]) -> list[bytes]:
    try:
        return decode_base64(images)
    except RewardError as error:
        raise HTTPException(422, str(error)) from None


def _exception(refusal: Refusal) -> HTTPException:
    headers = {"Retry-After": "1"} if refusal.status in (429, 503) else None
    return HTTPException(refusal.status, refusal.message, headers)


async def _invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    # without the input, which FastAPI would include: it may be megabytes of images
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return answer(
            400, f"the body is not JSON ({first.get('ctx', {}).get('error', first['msg'])}): correct the client"
        )
    where = ".".join(str(part) for part in first["loc"] if part != "body") or "the body"
    more = f", and {len(error.errors()) - 1} more" if len(error.errors()) > 1 else ""
    return answer(422, f"{where}: {first['msg'].removeprefix('Value error, ')}{more} (see /docs)")


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return answer(error.status_code, str(error.detail), dict(error.headers) if error.headers else None)


async def _broken(_: Request, error: Exception) -> Response:
    log.error("a request failed with %s: %s", type(error).__name__, error)
    return answer(500, f"the service failed with {type(error).__name__}: check its log")
