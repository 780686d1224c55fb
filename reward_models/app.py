"""The HTTP side of a reward service: a FastAPI application in front of a scorer, wherever that one runs.

Paths: `POST /v1/score` (the protocol of `gerl.rewards.scorers.remote`), `GET /v1/health` (the process answers),
`GET /v1/ready` (the scorer is loaded), `GET /metrics` (Prometheus), `/docs` and `/openapi.json`. Errors are
{"error": sentence, "version": "1"}.
"""

import asyncio
import base64
import binascii
import hmac
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, Self

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from fastapi.security import HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gerl.rewards.scorers.base import Columns, Metadata
from gerl.rewards.scorers.remote import VERSION
from reward_models.scoring import Refusal, Scoring

log = logging.getLogger(__name__)

SCORE = "/v1/score"
DRAIN_BYTES, DRAIN_SECONDS = 256 * 10**6, 10.0  # of the body of a refused request
BUCKETS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)  # seconds: a JPEG takes 0.01, a large judge minutes
REASONS = {
    400: "json",
    401: "token",
    404: "scorer_name",
    413: "size",
    422: "input",
    429: "rate",
    500: "scorer",
    503: "not_ready",
}


@dataclass(frozen=True)
class Limits:
    """The requests that a service admits; 0 requests a minute means any number. `token` None lets everyone in."""

    token: str | None = None
    max_body_mb: int = 64
    rate_per_minute: int = 0
    max_in_flight: int = 64


class ScoreRequest(BaseModel):
    """Images to be scored, each with its prompt and the other columns of the prompt's row."""

    model_config = ConfigDict(extra="forbid")

    scorer: str = Field(description="name of the scorer of this service", examples=["ocr"])
    images: list[str] = Field(min_length=1, description="PNG or JPEG files in base64")
    prompts: list[str]
    metadata: list[Metadata]

    @model_validator(mode="after")
    def same_length(self) -> Self:
        if not len(self.images) == len(self.prompts) == len(self.metadata):
            raise ValueError(
                f"{len(self.images)} images came with {len(self.prompts)} prompts and {len(self.metadata)} metadata: "
                "send one of each per image"
            )
        return self


class ScoreResponse(BaseModel):
    """One list per column, in the order of the images; the first column is the score that counts."""

    scores: Columns
    version: str = VERSION


class Health(BaseModel):
    """The process answers; whether it can score is asked at /v1/ready."""

    status: Literal["live"] = "live"
    scorers: list[str]
    version: str = VERSION


class Ready(BaseModel):
    """The scorer can score; further keys say where it runs."""

    model_config = ConfigDict(extra="allow")

    status: Literal["ready"] = "ready"
    version: str = VERSION


class Error(BaseModel):
    """The answer to a request that failed, in one sentence."""

    error: str
    version: str = VERSION


class Metrics:
    """The numbers at /metrics, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        self.requests = counter("gerl_reward_requests", "requests to /v1/score that were answered")
        self.errors = counter("gerl_reward_errors", "of those, answered with an error", labelnames=["reason"])
        self.images = counter("gerl_reward_images", "images scored")
        seconds = ("gerl_reward_request_seconds", "from first byte to answer")
        self.seconds = Histogram(*seconds, buckets=BUCKETS, registry=registry)
        self.in_flight = gauge("gerl_reward_requests_in_flight", "requests admitted and not yet answered")
        self.queue = gauge("gerl_reward_queue_images", "images handed to the scorer and not yet scored")


class TokenBucket:
    """Admits `per_minute` requests a minute, and as many at once after a minute's rest; 0 admits all."""

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_minute, self.clock = per_minute, clock
        self._left, self._seen = float(per_minute), clock()

    def take(self) -> float:
        """Take one, or take none and return the seconds until there is one."""
        if self.per_minute == 0:
            return 0.0
        now = self.clock()
        rate = self.per_minute / 60
        self._left = min(float(self.per_minute), self._left + (now - self._seen) * rate)
        self._seen = now
        if self._left >= 1:
            self._left -= 1
            return 0.0
        return (1 - self._left) / rate


class Guard:
    """ASGI middleware: lets requests to `SCORE` pass if token, rate, number and size allow, and counts them all."""

    def __init__(self, app: ASGIApp, limits: Limits, metrics: Metrics) -> None:
        self.app, self.limits, self.metrics = app, limits, metrics
        self.bucket = TokenBucket(limits.rate_per_minute)
        self.admitted = 0

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
            refusal = self._refusal(Headers(scope=scope))
            if refusal is not None:
                await _drain(Headers(scope=scope), receive)
                await refusal(scope, receive, watch)
            else:
                await self._admit(scope, receive, watch)
        finally:
            self.metrics.requests.inc()
            self.metrics.seconds.observe(time.perf_counter() - start)
            if status >= 400:
                self.metrics.errors.labels(REASONS.get(status, "other")).inc()

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        read = 0

        async def count() -> Message:
            # The length need not be announced, so it is also counted.
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self.limits.max_body_mb * 10**6:
                if message.get("more_body", False):
                    await _drain(Headers(scope=scope), receive)
                raise HTTPException(413, self._too_large(f"{read} or more"))
            return message

        self.admitted += 1
        self.metrics.in_flight.inc()
        try:
            await self.app(scope, count, send)
        finally:
            self.admitted -= 1
            self.metrics.in_flight.dec()

    def _refusal(self, headers: Headers) -> JSONResponse | None:
        token = self.limits.token
        if token is not None:
            kind, _, given = headers.get("authorization", "").partition(" ")
            if kind.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), token.encode()):
                sentence = "a bearer token is wanted, and none or another came: send the one of this service"
                return answer(401, sentence, {"WWW-Authenticate": "Bearer"})
        if self.admitted >= self.limits.max_in_flight:
            sentence = f"{self.admitted} requests are being scored, at most {self.limits.max_in_flight} may be"
            return answer(429, f"{sentence}: send fewer at a time", {"Retry-After": "1"})
        if (length := _announced(headers)) > self.limits.max_body_mb * 10**6:
            return answer(413, self._too_large(str(length)))
        # Last, so that what is refused for another reason does not use up the rate.
        if wait := self.bucket.take():
            sentence = f"more than {self.limits.rate_per_minute} requests a minute: wait {wait:.1f} s"
            return answer(429, sentence, {"Retry-After": str(math.ceil(wait))})
        return None

    def _too_large(self, size: str) -> str:
        limit = self.limits.max_body_mb
        return f"the request has {size} bytes, at most {limit} MB may come: send fewer or smaller images at a time"


def _announced(headers: Headers) -> int:
    """Bytes of the body as announced, 0 if they are not; what really comes is counted as well."""
    length = headers.get("content-length", "")
    return int(length) if length.isascii() and length.isdigit() else 0


async def _drain(headers: Headers, receive: Receive) -> None:
    """Read and drop what the client is sending, within bounds.

    A client that is still sending when the connection closes sees a broken connection and not the answer.
    """
    if headers.get("expect", "").lower() == "100-continue" or _announced(headers) > DRAIN_BYTES:
        return
    read = 0
    try:
        async with asyncio.timeout(DRAIN_SECONDS):
            while read <= DRAIN_BYTES:
                message = await receive()
                read += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return
    except TimeoutError:
        return


def answer(status: int, sentence: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """An error as JSON."""
    return JSONResponse(Error(error=sentence).model_dump(), status, headers)


def build_app(name: str, scoring: Scoring, limits: Limits | None = None) -> FastAPI:
    """The service of the scorer `name`, which `scoring` runs."""
    limits = limits or Limits()
    app = FastAPI(
        title=f"gerl reward service: {name}",
        version=VERSION,
        description="Scores images for their prompts; higher is better.",
    )
    metrics = Metrics()
    app.add_middleware(Guard, limits=limits, metrics=metrics)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(Exception, _broken)
    # The guard checks the token before the body is read; this one only tells the OpenAPI page about it.
    asks = [Depends(HTTPBearer(auto_error=False))] if limits.token is not None else []
    errors: dict[int | str, dict[str, object]] = {status: {"model": Error} for status in REASONS}

    @app.post(SCORE, responses=errors, dependencies=asks)
    async def score(request: ScoreRequest) -> ScoreResponse:
        """Score images."""
        if request.scorer != name:
            raise HTTPException(404, f"there is no scorer {request.scorer!r:.80} here, only {name}")
        images = await asyncio.to_thread(_decoded, request.images)
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
        """The numbers of this service in the text format of Prometheus."""
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return app


def _decoded(images: list[str]) -> list[bytes]:
    files = []
    for i, text in enumerate(images):
        try:
            files.append(base64.b64decode(text, validate=True))
        except (binascii.Error, ValueError):
            raise HTTPException(
                422, f"image {i} of {len(images)} is not base64: encode the bytes of its file"
            ) from None
    return files


def _exception(refusal: Refusal) -> HTTPException:
    headers = {"Retry-After": "1"} if refusal.status in (429, 503) else None
    return HTTPException(refusal.status, refusal.message, headers)


async def _invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    # Without the input, which FastAPI would send back: it may be megabytes of images.
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
    return answer(500, f"the service failed with {type(error).__name__}: look into its log")
