"""Shared parts of gerl's web servers: access control, connection limits, a server thread, and push notifications."""

import asyncio
import contextlib
import hmac
import itertools
import logging
import math
import resource
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import uvicorn
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from gerl.errors import GerlError
from gerl.utils.serving import host_name, is_foreign, is_loopback

SAFE = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",  # addresses may contain tokens
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
NOBODY = secrets.token_urlsafe(24)
BODY, RATE = 20.0, 500_000  # seconds to receive a body, and bytes per second above
DRAIN_BYTES, DRAIN_SECONDS = 256 * 10**6, 10.0  # of the body of a refused request, which is read and discarded


@dataclass(frozen=True)
class Visit:
    """Admitted request with its visitor, path, maximum body size `most` in bytes, and headers of the answer."""

    path: str
    most: int
    visitor: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    kinds: Sequence[str] = ("application/json",)  # content types; none that a form of another site can send


class Queue:
    """Room for requests: at most `most` whose bodies have arrived, and `size` bytes of bodies, arriving ones included.

    A body that is slow takes no place of others, only the room of its bytes.
    """

    def __init__(self, most: int = 64, size: int = 256 * 10**6, per_minute: int = 0) -> None:
        """`per_minute`: maximum number of requests a minute; 0: unlimited."""
        self.most, self.size, self.bucket = most, size, TokenBucket(per_minute)
        self.requests = self.bytes = 0

    def refusal(self, size: int = 0, counts: bool = False) -> Response | None:
        """Return the answer to a request without room for `size` bytes to come, or one that `counts` above the rate."""
        if self.requests >= self.most:
            sentence = f"{self.requests} requests are being answered, at most {self.most} are allowed"
        elif self.bytes + size > self.size:
            sentence = f"the requests have {self.bytes} bytes, at most {self.size // 10**6} MB are allowed together"
        elif counts and (wait := self.bucket.take()):
            sentence = f"more than {self.bucket.per_minute} requests per minute: wait {wait:.1f} s"
            return refused(429, sentence, {"Retry-After": str(math.ceil(wait))})
        else:
            return None
        return refused(429, f"{sentence}: send fewer at a time", {"Retry-After": "1"})


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


@dataclass(frozen=True)
class Gate:
    """ASGI middleware that admits requests with `admit` and sets the visitor (`request.state.visitor`).

    It reads the bodies, within their limits of size and time, so that the application is called with whole ones.
    """

    app: ASGIApp
    admit: Callable[[Request], Visit | Response]
    local: bool  # answer only requests whose Host is this machine, against DNS rebinding
    queue: Queue = field(default_factory=Queue)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request, connection = Request(scope), cast("dict[str, Any]", scope)
        visit = self._elsewhere(request) or self.admit(request)
        more: Mapping[str, str] = SAFE
        if isinstance(visit, Visit):
            scope = {**scope, "path": visit.path, "state": {**scope.get("state", {}), "visitor": visit.visitor}}
            more = {**SAFE, **visit.headers}

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in more.items():
                    headers.setdefault(name, value)
                connection[STREAM] = headers.get("content-type", "").startswith("text/event-stream")
            await send(message)

        if isinstance(visit, Response):
            await _refuse(visit, request.headers, receive, with_headers)
        elif request.method in ("GET", "HEAD"):
            await self.app(scope, receive, with_headers)
        else:
            await self._with_body(scope, visit, receive, with_headers)

    def _elsewhere(self, request: Request) -> Response | None:
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        if self.local and not is_loopback(host_name(host)):
            return refused(403, f"the host {host!r:.80} is not this machine: use 127.0.0.1 or localhost")
        if is_foreign(request.method, request.headers):
            return refused(403, f"the request comes from another site, {origin!r:.80}: use the page of this server")
        return None

    async def _with_body(self, scope: Scope, visit: Visit, receive: Receive, send: Send) -> None:
        headers, body = Headers(scope=scope), bytearray()
        refusal = _wrong_body(headers, visit) or self.queue.refusal(_announced(headers), counts=True)
        try:
            refusal = refusal or await self._read(body, headers, visit, receive) or self.queue.refusal()
            if refusal is not None:
                await _refuse(refusal, headers, receive, send)
                return
            messages: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

            async def whole() -> Message:
                return messages.pop() if messages else await receive()

            self.queue.requests += 1
            try:
                await self.app(scope, whole, send)
            finally:
                self.queue.requests -= 1
        except ClientDisconnect:
            return
        finally:
            self.queue.bytes -= len(body)

    async def _read(self, body: bytearray, headers: Headers, visit: Visit, receive: Receive) -> Response | None:
        """Read the request into `body`, or return why not; its length need not be announced."""
        seconds = BODY + (_announced(headers) or visit.most) / RATE
        try:
            async with asyncio.timeout(seconds):
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnect
                    part, more = message.get("body", b""), message.get("more_body", False)
                    body += part
                    self.queue.bytes += len(part)
                    if len(body) > visit.most:
                        return _too_large(f"{len(body)} or more", visit)
                    if more and self.queue.bytes > self.queue.size:
                        return self.queue.refusal()
        except TimeoutError:
            return refused(408, f"the body did not arrive within {seconds:.0f} s: send less at a time")
        return None


def _wrong_body(headers: Headers, visit: Visit) -> Response | None:
    """Refuse a body that is too large, or has a content type that a form of another site could send."""
    if not {"content-length", "transfer-encoding"} & set(headers):
        return refused(411, "the request does not state the length of its body: send Content-Length")
    if (length := _announced(headers)) > visit.most:
        return _too_large(str(length), visit)
    if headers.get("content-type", "").partition(";")[0].strip().lower() not in visit.kinds:
        return refused(415, f"expected another kind of body: send Content-Type: {' or '.join(visit.kinds)}")
    return None


def _announced(headers: Headers) -> int:
    """Return the Content-Length, or 0 if it is missing; received bytes are counted as well."""
    length = headers.get("content-length", "")
    return int(length[:20]) if length.isascii() and length.isdigit() else 0


def _too_large(size: str, visit: Visit) -> Response:
    most = f"{visit.most // 10**6} MB" if visit.most >= 10**6 else f"{visit.most} bytes"
    return refused(413, f"the request has {size} bytes, at most {most} are allowed: send less at a time")


async def _refuse(refusal: Response, headers: Headers, receive: Receive, send: Send) -> None:
    """Answer, then read and discard what the client is sending, within bounds.

    A client that is still sending when the connection closes sees a broken connection instead of the answer.
    """
    await send({"type": "http.response.start", "status": refusal.status_code, "headers": refusal.raw_headers})
    await send({"type": "http.response.body", "body": refusal.body, "more_body": True})
    if headers.get("expect", "").lower() != "100-continue" and _announced(headers) <= DRAIN_BYTES:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_SECONDS):
                while (await receive()).get("more_body", False):
                    pass
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def is_token(token: str | None, wanted: str | None) -> bool:
    """Compare tokens in constant time; False if `wanted` is None."""
    return hmac.compare_digest((token or "").encode(), (wanted or NOBODY).encode())


def admit_page(token: str | None, most: int, request: Request) -> Visit | None:
    """Admit requests with the token in a cookie, as a bearer token, or in the address that opens the page; else None.

    The address sets the cookie.
    """
    path, headers = request.scope["path"], {}
    shown = [request.cookies.get(cookie(request)), bearer(request.headers)]
    if token is not None and request.method == "GET" and path == "/" and "token" in request.query_params:
        shown.append(request.query_params["token"])
        headers = cookie_of(token, request)
    admitted = token is None or any(is_token(each, token) for each in shown)
    return Visit(path, most, headers=headers) if admitted else None


def cookie(request: Request) -> str:
    """Return the name of the cookie; another page on this machine has another port."""
    return f"gerl_{request.url.port}"


def cookie_of(token: str, request: Request) -> dict[str, str]:
    """Return the header that sets the cookie."""
    return {"Set-Cookie": f"{cookie(request)}={token}; Path=/; HttpOnly; SameSite=Strict"}


def bearer(headers: Headers) -> str | None:
    """Return the bearer token in `Authorization`, if any."""
    kind, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if kind.lower() == "bearer" else None


def refused(status: int, sentence: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """Return an answer that explains the refusal."""
    return JSONResponse({"error": sentence}, status, headers)


# --- Connections: idle ones must not block others

HEAD = 20.0  # seconds to receive the head of a request
MOST = 1000  # maximum number of open connections
SPARE = 64  # files that a server needs for other purposes
TURNS = itertools.count(1)
STREAM = "gerl.stream"  # in the scope of a request that is answered by events without end


def most() -> int:
    """Return the limit of open connections, derived from the process's limit of open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST if soft == resource.RLIM_INFINITY else max(8, min(MOST, soft - SPARE))


class Connection(H11Protocol):
    """Connection that is closed if no request arrives in time; above the limit, the longest waiting one is closed.

    An event stream waits, too: its page connects again.
    """

    late: asyncio.TimerHandle | None = None
    turn = 0  # order of waiting: timers tie, because uvloop rounds them to milliseconds

    def is_waiting(self) -> bool:
        """Whether it waits for its client: for the head or the body of a request, or to read the answer."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body or self.flow.write_paused:
            return True
        return bool(cast("dict[str, Any]", cycle.scope).get(STREAM))

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._expect_head()
        if len(self.connections) > most():
            waiting = [one for one in self.connections if isinstance(one, Connection) and one.is_waiting()]
            min(waiting, key=lambda one: one.turn)._close()

    def data_received(self, data: bytes) -> None:
        if self.late is None and (self.cycle is None or self.cycle.response_complete):
            self._expect_head()
        cycle = self.cycle
        super().data_received(data)
        if self.cycle is not cycle:  # the head is complete
            self._has_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._has_head()
        super().connection_lost(exc)

    def _expect_head(self) -> None:
        self.late, self.turn = self.loop.call_later(HEAD, self._close), next(TURNS)

    def _has_head(self) -> None:
        if self.late is not None:
            self.late.cancel()
            self.late = None

    def _close(self) -> None:
        self._has_head()
        self.connections.discard(self)  # others may arrive before the loop has closed it
        with contextlib.suppress(OSError):
            self.transport.abort()


# --- Server thread, and notifications of its pages

STARTING = 10.0  # seconds


@contextlib.contextmanager
def serving(app: ASGIApp, listener: socket.socket, closing: float) -> Iterator[threading.Thread]:
    """Serve `app` at `listener` within the context, in a thread, which leaves signals to the main thread.

    Requests in progress at its end have `closing` seconds. Raises `GerlError` if the server does not start.
    """
    config = uvicorn.Config(
        app,
        http=Connection,
        ws="none",  # an upgrade would leave `Connection`
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=int(closing),
        server_header=False,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],), name="http", daemon=True)
    thread.start()
    try:
        deadline = time.monotonic() + STARTING
        while not server.started:
            if not thread.is_alive() or time.monotonic() > deadline:
                raise GerlError("the HTTP server failed to start: see its log")
            time.sleep(0.01)
        yield thread
    finally:
        # open event streams never end by themselves, and uvicorn would log an error for each
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        server.should_exit = True
        thread.join(closing + 5)
        listener.close()


def stop_on_signals(stop: threading.Event) -> None:
    """Let SIGINT and SIGTERM set `stop`, if called in the main thread."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop.set())


def address(listener: socket.socket, host: str | None = None) -> str:
    """Return the URL of a socket, optionally with another host name of this machine."""
    bound, port = listener.getsockname()[:2]
    name = host or bound
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"


class Subscriber:
    """Subscription of a page to notifications; must be created in its event loop."""

    def __init__(self) -> None:
        self._loop, self._news = asyncio.get_running_loop(), asyncio.Event()

    def wake(self) -> None:
        """Notify the page; may be called from any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._news.set)

    async def wait(self, seconds: float) -> bool:
        """Wait at most `seconds` for a notification; return whether there was one."""
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            return False
        self._news.clear()
        return True
