"""Access control of a reward service: tokens, request limits, and the metrics at /metrics."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gerl.commandline.command import host_name, is_foreign, is_loopback
from gerl.rewards.scorers.base import VERSION
from gerl.web.server import bearer, is_token
from reward_models.scoring import ImageLimits

SCORE = "/v1/score"
BODY_SECONDS = 120.0  # time-out for receiving a request's body
WAIT_SECONDS = 30.0  # maximum wait for the pixels of other requests to be scored
DRAIN_BYTES, DRAIN_SECONDS = 256 * 10**6, 10.0  # bounds for reading the body of a refused request
BUSY = "the images of other requests use all the pixels of max_in_flight_megapixels: send fewer at a time"
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


class Error(BaseModel):
    """Error answer to a request, in one sentence."""

    error: str
    version: str = VERSION


class Metrics:
    """Metrics at /metrics, in a separate registry."""

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
    """Rate limiter for `per_minute` requests a minute, with bursts of the same size; 0 means unlimited."""

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_minute, self.clock = per_minute, clock
        self._left, self._seen = float(per_minute), clock()

    def take(self) -> float:
        """Take a token and return 0, or return the seconds until one is available."""
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


class Guard:
    """ASGI middleware that admits requests to `SCORE` by token, rate, number and size, and counts them."""

    def __init__(self, app: ASGIApp, limits: Limits, metrics: Metrics) -> None:
        self.app, self.limits, self.metrics = app, limits, metrics
        self.bucket = TokenBucket(limits.rate_per_minute)
        self.admitted = self.admitted_bytes = 0

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
                await _refuse(refusal, Headers(scope=scope), receive, watch)
            else:
                await self._admit(scope, receive, watch)
        finally:
            self.metrics.requests.inc()
            self.metrics.seconds.observe(time.perf_counter() - start)
            if status >= 400:
                self.metrics.errors.labels(REASONS.get(status, "other")).inc()

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        read = 0
        size = self._size(Headers(scope=scope))
        until = asyncio.get_running_loop().time() + BODY_SECONDS
        more = True

        async def count() -> Message:
            # also counted here, because the length need not be announced
            nonlocal read, more
            try:
                async with asyncio.timeout_at(until if more else None):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(
                    408, f"the body did not arrive within {BODY_SECONDS:g} s: send less at a time"
                ) from None
            read += len(message.get("body", b""))
            more = message.get("more_body", False)
            if read > self.limits.max_body_mb * 10**6:
                if more:
                    await _drain(Headers(scope=scope), receive)
                raise HTTPException(413, self._too_large(f"{read} or more"))
            return message

        self.admitted += 1
        self.admitted_bytes += size
        self.metrics.in_flight.inc()
        try:
            await self.app(scope, count, send)
        finally:
            self.admitted -= 1
            self.admitted_bytes -= size
            self.metrics.in_flight.dec()

    def _size(self, headers: Headers) -> int:
        """Return the Content-Length, or the largest allowed body if it is missing."""
        return _announced(headers) or self.limits.max_body_mb * 10**6

    def _refusal(self, headers: Headers) -> JSONResponse | None:
        if is_foreign("POST", headers):  # a page of another site in a browser, which needs no token on this machine
            return answer(403, "the request comes from a page of another site: send it from a program")
        if self.limits.local and not is_loopback(host_name(headers.get("host", ""))):
            return answer(403, "the host is not this machine: use 127.0.0.1 or localhost, or set a token")
        if self.limits.token is not None and not is_token(bearer(headers), self.limits.token):
            sentence = "a bearer token is required, and none or another was sent: send the one of this service"
            return answer(401, sentence, {"WWW-Authenticate": "Bearer"})
        if not {"content-length", "transfer-encoding"} & set(headers):
            return answer(411, "the request does not state the length of its body: send Content-Length")
        if (length := _announced(headers)) > self.limits.max_body_mb * 10**6:
            return answer(413, self._too_large(str(length)))
        if self.admitted >= self.limits.max_in_flight:
            sentence = f"{self.admitted} requests are being scored, at most {self.limits.max_in_flight} are allowed"
            return answer(429, f"{sentence}: send fewer at a time", {"Retry-After": "1"})
        if self.admitted_bytes + self._size(headers) > (most := self.limits.max_in_flight_mb) * 10**6:
            sentence = f"the requests being scored have {self.admitted_bytes} bytes, at most {most} MB are allowed"
            return answer(429, f"{sentence} together: send fewer at a time", {"Retry-After": "1"})
        # last, so that requests refused for another reason do not consume the rate
        if wait := self.bucket.take():
            sentence = f"more than {self.limits.rate_per_minute} requests per minute: wait {wait:.1f} s"
            return answer(429, sentence, {"Retry-After": str(math.ceil(wait))})
        return None

    def _too_large(self, size: str) -> str:
        limit = self.limits.max_body_mb
        return f"the request has {size} bytes, at most {limit} MB are allowed: send fewer or smaller images at a time"


def _announced(headers: Headers) -> int:
    """Return the Content-Length, or 0 if it is missing; received bytes are counted as well."""
    length = headers.get("content-length", "")
    return int(length[:20]) if length.isascii() and length.isdigit() else 0


async def _refuse(refusal: JSONResponse, headers: Headers, receive: Receive, send: Send) -> None:
    """Answer before reading any of the body, then drain it."""
    await send({"type": "http.response.start", "status": refusal.status_code, "headers": refusal.raw_headers})
    await send({"type": "http.response.body", "body": refusal.body, "more_body": True})
    await _drain(headers, receive)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _drain(headers: Headers, receive: Receive) -> None:
    """Read and discard what the client is sending, within bounds.

    A client that is still sending when the connection closes sees a broken connection instead of the answer.
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
    """Return an error as JSON."""
    return JSONResponse(Error(error=sentence).model_dump(), status, headers)
