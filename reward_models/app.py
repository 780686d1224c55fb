"""HTTP interface of a reward service: a FastAPI application in front of a scorer.

Paths: `POST /v1/score` (the protocol of `reward_models.scorers.remote`), `GET /v1/health` (the process is live), `GET
/v1/ready` (the scorer is loaded), `GET /metrics` (Prometheus), `/docs` and `/openapi.json`. Errors are {"error":
sentence, "version": "1"}.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal, Self

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from fastapi.security import HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from pydantic import BaseModel, ConfigDict, FailFast, Field, model_validator
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gerl.config.schema import DEEPEST, is_flat
from gerl.errors import RewardError
from gerl.rewards.scorers.base import VERSION, Columns, Metadata, decode_base64
from gerl.web.server import Gate, Queue, Visit, bearer, is_token, refused
from reward_models.scoring import MEGAPIXEL, ImageLimits, Refusal, Scoring, measure

log = logging.getLogger(__name__)
SCORE = "/v1/score"
WAIT_SECONDS = 30.0  # maximum wait for the pixels of other requests to be scored
BUSY = "the images of other requests use all the pixels of max_in_flight_megapixels: send fewer at a time"
DOCS = {"Content-Security-Policy": "frame-ancestors 'none'"}  # its page loads scripts
BUCKETS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)  # seconds: a JPEG takes 0.01, a large judge minutes
REASONS = {  # of errors, in the metrics
    400: "json", 401: "token", 403: "site", 404: "scorer_name", 408: "slow", 411: "length", 413: "size", 422: "input",
    429: "rate", 500: "scorer", 503: "not_ready",
}  # fmt: skip


@dataclass(frozen=True)
class Limits(ImageLimits):
    """Request limits of a service; 0 requests per minute means unlimited, and `token` None admits everyone.

    At most `max_in_flight` requests are processed at a time, with a total of `max_in_flight_mb` million bytes and
    `max_in_flight_megapixels` million pixels. `local`: accept only requests whose host is this machine.
    """

    token: str | None = None
    local: bool = False
    max_body_mb: int = 64
    rate_per_minute: int = 0
    max_in_flight: int = 64
    max_in_flight_mb: int = 256
    max_in_flight_megapixels: int = 256

    def queue(self) -> Queue:
        return Queue(self.max_in_flight, self.max_in_flight_mb * 10**6, self.rate_per_minute)

    def admit(self, request: Request) -> Visit | Response:
        """Admit requests to `SCORE` with the token, and all to the other paths, which only read."""
        path: str = request.scope["path"]
        if path != SCORE:
            return Visit(path, 10_000, headers=DOCS)
        if self.token is not None and not is_token(bearer(request.headers), self.token):
            sentence = "a bearer token is required, and none or another was sent: send the one of this service"
            return refused(401, sentence, {"WWW-Authenticate": "Bearer"})
        return Visit(path, self.max_body_mb * 10**6)


class Error(BaseModel):
    """Error answer to a request, in one sentence."""

    error: str
    version: str = VERSION


class Metrics:
    """Metrics at /metrics, in a separate registry."""

    def __init__(self, queue: Queue) -> None:
        self.registry = registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        self.requests = counter("gerl_reward_requests", "requests to /v1/score that were answered")
        self.errors = counter("gerl_reward_errors", "of those, answered with an error", labelnames=["reason"])
        self.images = counter("gerl_reward_images", "images scored")
        seconds = ("gerl_reward_request_seconds", "from first byte to answer")
        self.seconds = Histogram(*seconds, buckets=BUCKETS, registry=registry)
        in_flight = gauge("gerl_reward_requests_in_flight", "requests admitted and not yet answered")
        in_flight.set_function(lambda: queue.requests)
        self.queue = gauge("gerl_reward_queue_images", "images handed to the scorer and not yet scored")


class Room:
    """Semaphore for work up to a total size of `most`."""

    def __init__(self, most: int) -> None:
        self.left = most
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def hold(self, size: int, seconds: float) -> AsyncIterator[bool]:
        """Reserve `size` within the context; yields False if it was not available within `seconds`."""
        try:
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait_for(lambda: self.left >= size)
                self.left -= size
        except TimeoutError:
            yield False
            return
        try:
            yield True
        finally:
            async with self._changed:
                self.left += size
                self._changed.notify_all()


class Counted:
    """ASGI middleware that counts requests to `SCORE` and measures their time."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != SCORE:
            await self.app(scope, receive, send)
            return
        start = time.perf_counter()
        status = 500

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, watch)
        finally:
            self.metrics.requests.inc()
            self.metrics.seconds.observe(time.perf_counter() - start)
            if status >= 400:
                self.metrics.errors.labels(REASONS.get(status, "other")).inc()


# --- The application


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
    metrics = Metrics(queue := limits.queue())
    room = Room(limits.max_in_flight_megapixels * MEGAPIXEL)
    app.add_middleware(Gate, admit=limits.admit, local=limits.local, queue=queue)
    app.add_middleware(Counted, metrics=metrics)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(Exception, _broken)
    # the gate checks the token before reading the body; this dependency only documents it in OpenAPI
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


def answer(status: int, sentence: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """Return an error as JSON."""
    return JSONResponse(Error(error=sentence).model_dump(), status, headers)


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
