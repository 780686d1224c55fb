"""Watch runs in a browser: `python -m gerl.watch [run=FOLDER] [key=value ...]`."""

import contextlib
import logging
import secrets
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from gerl.commandline.arguments import Parser, key
from gerl.commandline.command import PAGE, run_command
from gerl.errors import ConfigError, GerlError
from gerl.utils.imports import importing
from gerl.utils.serving import is_loopback, listen, read_token, require

if TYPE_CHECKING:
    from starlette.types import ASGIApp

logger = logging.getLogger("gerl")
LOOK = 0.5  # seconds between checks that the server still runs
CLOSING = 3.0  # seconds for requests in progress when the page is closed


@dataclass(frozen=True, kw_only=True)
class PageOptions:
    """Where a page is served, and to whom."""

    port: int | None = key(
        f"port to listen on; 0 selects a free one; default: {PAGE}, or a free one if that is taken",
        unit="a port, 0 to 65535",
        low=0,
    )
    host: str = key(
        "the address to listen on; one that other machines can reach, such as 0.0.0.0, requires a token", "127.0.0.1"
    )
    token_env: str | None = key(
        "the environment variable with the token that opens the page; default: a random one, and none where only this "
        "machine can watch"
    )

    @property
    def local(self) -> bool:
        """Whether to answer only requests whose host is this machine; with `token_env` a proxy may be before it."""
        return self.token_env is None and is_loopback(self.host)


@dataclass(frozen=True, kw_only=True)
class Request(PageOptions):
    """Command-line options."""

    run: Path = key("a run folder, or a folder with runs in it", Path("outputs"))


PARSER = Parser(
    "the page",
    "python -m gerl.watch",
    "[run=FOLDER] [key=value ...]",
    "Watch a run in a browser while it trains, or afterwards; closing the page does not affect the run.",
    Request,
    bare="run",
)


def main(argv: Sequence[str] | None = None, program: str = PARSER.program) -> int:
    """Run the command line; returns the exit code, see `run_command`: 0 after Ctrl-C or SIGTERM."""
    stop = threading.Event()
    return run_command(argv, lambda: PARSER.help(program), lambda given: serve(PARSER.parse(given)[0], stop))


def serve(request: Request, stop: threading.Event) -> None:
    """Serve the page until `stop` is set; raises `GerlError` if that fails."""
    token = checked_token(request, "watch")
    from gerl.web.site import Folders, build_site

    app, site = build_site(Folders.of(request.run), token, request.local)
    with opened(request.host, request.port) as listener:
        logger.info("%s\nCtrl-C stops the page; runs continue", "\n".join(addresses(request.host, listener, token)))
        serve_app(app, listener, stop, site.closing)


def checked_token(options: PageOptions, extra: str, runs_code: bool = False) -> str | None:
    """Check the options of a page and import its packages; return its token, a random one if it needs one.

    `runs_code`: through the page, which then needs one on this machine, too: other people may use it.
    Raises `GerlError` for a wrong option, or if a package of `extra` is missing.
    """
    if options.port is not None and options.port > 65535:
        raise ConfigError(f"port={options.port}: expected a port, 0 to 65535")
    with importing():
        require(extra, "starlette", "uvicorn")
    if options.token_env is not None:
        return read_token(options.token_env)
    return None if options.local and not runs_code else secrets.token_urlsafe(24)


def serve_app(app: "ASGIApp", listener: socket.socket, stop: threading.Event, *closing: threading.Event) -> None:
    """Serve `app` until `stop` is set, which signals do; then sets `closing`, which ends its event streams."""
    from gerl.web.server import serving, stop_on_signals

    with serving(app, listener, CLOSING) as thread:
        stop_on_signals(stop)
        try:
            while not stop.wait(LOOK):
                if not thread.is_alive():
                    raise GerlError("the page's server stopped: see its log")
        finally:
            for event in closing:
                event.set()


def opened(host: str, port: int | None) -> socket.socket:
    """Bind `host:port`; without a port, the default one or else a free one. Raises `ConfigError` on failure."""
    if port is None:
        with contextlib.suppress(ConfigError):
            return listen(host, PAGE)
    return listen(host, port or 0, "port=0 selects a free one")


def addresses(host: str, listener: socket.socket, token: str | None) -> list[str]:
    """Return the addresses of the page for a browser."""
    from gerl.web.server import address

    names = ["localhost", socket.gethostname()] if host in ("0.0.0.0", "::") else [host]
    return [f"{address(listener, name)}/" + (f"?token={quote(token)}" if token else "") for name in names]
