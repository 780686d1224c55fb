"""Watch runs in a browser: `python -m gerl.watch [run=FOLDER] [key=value ...]`."""

import contextlib
import logging
import re
import secrets
import signal
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from urllib.parse import quote

from gerl.commandline.arguments import Parser, key
from gerl.commandline.command import PAGE, importing, is_loopback, listen, run_command
from gerl.errors import ConfigError, GerlError
from gerl.watch.folders import Folders

logger = logging.getLogger("gerl")
TOKEN = re.compile(r"[0-9A-Za-z_.~-]+")
LOOK = 0.5  # seconds between looks at whether the server still runs
CLOSING = 3.0  # seconds for the answers under way when the page is closed


@dataclass(frozen=True, kw_only=True)
class Request:
    """The keys of the command line."""

    run: Path = key("a run folder, or a folder with runs in it", Path("outputs"))
    port: int | None = key(
        f"port to listen on; 0 selects a free one; default: {PAGE}, or a free one if that is taken",
        unit="a port, 0 to 65535",
        low=0,
    )
    host: str = key(
        "the address to listen on; one that other machines can reach, such as 0.0.0.0, requires a token", "127.0.0.1"
    )
    token: str | None = key("required to open the page; default: none on this machine, otherwise a random one")


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

    def work(arguments: list[str]) -> None:
        serve(PARSER.parse(arguments)[0], threading.Event())

    return run_command(argv, lambda: PARSER.help(program), work)


def serve(request: Request, stop: threading.Event) -> None:
    """Serve the page until `stop` is set; raises `GerlError` if that is not possible."""
    folders = Folders.of(request.run)
    if request.token is not None and not TOKEN.fullmatch(request.token):
        raise ConfigError("token: use ASCII letters, digits and _ - . ~, as they appear in an address")
    if request.port is not None and request.port > 65535:
        raise ConfigError(f"port={request.port}: expected a port, 0 to 65535")
    with importing():
        for module in ("starlette", "uvicorn"):
            _require(module)
        import uvicorn

        from gerl.commandline.http_server import Connection
        from gerl.watch.server import build_site
    token = request.token
    if token is None and not is_loopback(request.host):
        token = secrets.token_urlsafe(24)
    app, site = build_site(folders, token)
    with opened(request.host, request.port) as listener:
        config = uvicorn.Config(
            app,
            http=Connection,
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=int(CLOSING),
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listener],), name="http", daemon=True)
        thread.start()
        _on_signals(stop)
        logger.info("%s\nCtrl-C closes the page, not the runs", "\n".join(addresses(request.host, listener, token)))
        try:
            while not stop.wait(LOOK):
                if not thread.is_alive():
                    raise GerlError("the page's server stopped: see its log")
        finally:
            site.close()
            server.should_exit = True
            thread.join(CLOSING + 2)


def _on_signals(stop: threading.Event) -> None:
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop.set())


def opened(host: str, port: int | None) -> socket.socket:
    """A socket at `host:port`, or at any port where none is given and the usual one is taken.

    Raises `ConfigError` if there cannot be one.
    """
    if port is None:
        with contextlib.suppress(ConfigError):
            return listen(host, PAGE)
    return listen(host, port or 0, "port=0 selects a free one")


def addresses(host: str, listener: socket.socket, token: str | None) -> list[str]:
    """Where a browser finds the page."""
    port = listener.getsockname()[1]
    names = [host]
    if host in ("0.0.0.0", "::"):
        names = ["localhost", socket.gethostname()]
    shown = [f"[{name}]" if ":" in name else name for name in names]
    return [f"http://{name}:{port}/" + (f"?token={quote(token)}" if token else "") for name in shown]


def _require(module: str) -> None:
    try:
        import_module(module)
    except ImportError as error:
        raise GerlError(
            f"the page needs the package {module}, which cannot be imported ({error}): run pip install 'gerl[watch]'"
        ) from None
