"""Shared parts of gerl's web servers: access control, connection limits, a server thread, and push notifications."""

import asyncio
import contextlib
import hmac
import itertools
import logging
import resource
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from gerl.commandline.command import host_name, is_foreign, is_loopback
from gerl.errors import GerlError

SAFE = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",  # addresses may contain tokens
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
NOBODY = secrets.token_urlsafe(24)


@dataclass(frozen=True)
class Visit:
    """Admitted request with its visitor, path, maximum body size `most` in bytes, and headers of the answer."""

    path: str
    most: int
    visitor: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Gate:
    """ASGI middleware that admits requests with `admit` and sets the visitor (`request.state.visitor`)."""

    app: ASGIApp
    admit: Callable[[Request], Visit | Response]
    local: bool  # answer only requests whose Host is this machine, against DNS rebinding

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request = Request(scope)
        found = self._elsewhere(request) or self.admit(request)
        more: Mapping[str, str] = SAFE
        if isinstance(found, Visit):
            scope = {**scope, "path": found.path, "state": {**scope.get("state", {}), "visitor": found.visitor}}
            more = {**SAFE, **found.headers}

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in more.items():
                    headers.setdefault(name, value)
            await send(message)

        answer = found if isinstance(found, Response) else _wrong_body(request, found.most) or self.app
        await answer(scope, receive, with_headers)

    def _elsewhere(self, request: Request) -> Response | None:
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        if self.local and not is_loopback(host_name(host)):
            return refused(403, f"the host {host!r:.80} is not this machine: use 127.0.0.1 or localhost")
        if is_foreign(request.method, request.headers):
            return refused(403, f"the request comes from another site, {origin!r:.80}: use the page of this server")
        return None


def _wrong_body(request: Request, most: int) -> Response | None:
    """Refuse a body that is too large, or has a content type that a form of another site could send."""
    if request.method in ("GET", "HEAD"):
        return None
    length = request.headers.get("content-length", "")
    if not (length.isascii() and length.isdigit()):
        return refused(411, "the request does not state the length of its body: send Content-Length")
    if int(length[:20]) > most:
        return refused(413, f"the request has {length[:20]} bytes, at most {most} are allowed: send less")
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        return refused(415, "the body is not JSON: send Content-Type: application/json")
    return None


def is_token(given: str | None, wanted: str | None) -> bool:
    """Compare tokens in constant time; False if `wanted` is None."""
    return hmac.compare_digest((given or "").encode(), (wanted or NOBODY).encode())


def bearer(headers: Headers) -> str | None:
    """Return the bearer token in `Authorization`, if any."""
    kind, _, given = headers.get("authorization", "").partition(" ")
    return given.strip() if kind.lower() == "bearer" else None


def refused(status: int, sentence: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """Return an answer that explains the refusal."""
    return JSONResponse({"error": sentence}, status, headers)


# --- Connections: idle ones must not block others

HEAD = 20.0  # seconds to receive the head of a request
MOST = 1000  # maximum number of open connections
SPARE = 64  # files that a server needs for other purposes
TURNS = itertools.count(1)


def most() -> int:
    """Return the limit of open connections, derived from the process's limit of open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST if soft == resource.RLIM_INFINITY else max(8, min(MOST, soft - SPARE))


class Connection(H11Protocol):
    """Connection that is closed if no request arrives in time; above the limit, the longest idle one is closed."""

    late: asyncio.TimerHandle | None = None
    turn = 0  # order of waiting: timers tie, because uvloop rounds them to milliseconds

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._expect_head()
        if len(self.connections) > most():
            waiting = [other for other in self.connections if isinstance(other, Connection) and other.late is not None]
            min(waiting, key=lambda other: other.turn)._close()

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
