"""Start, watch, compare and export runs in a browser: `gerl studio [folder=FOLDER] [key=value ...]`."""

import logging
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gerl.commandline.arguments import Parser, key
from gerl.commandline.command import PAGE, importing, is_loopback, require, run_command
from gerl.errors import ConfigError, GerlError
from gerl.web.watch import CLOSING, LOOK, TOKEN, addresses, opened

logger = logging.getLogger("gerl")


@dataclass(frozen=True, kw_only=True)
class Request:
    """Command-line options."""

    folder: Path = key("the folder of the runs, which is made if it is missing", Path("outputs"))
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
    "the studio",
    "gerl studio",
    "[folder=FOLDER] [key=value ...]",
    "Start, watch, compare and export runs in a browser; closing the page does not affect the runs.",
    Request,
    bare="folder",
)


def main(argv: Sequence[str] | None = None, program: str = PARSER.program) -> int:
    """Run the command line; returns the exit code, see `run_command`: 0 after Ctrl-C or SIGTERM."""
    stop = threading.Event()
    return run_command(argv, lambda: PARSER.help(program), lambda given: serve(PARSER.parse(given)[0], stop))


def serve(request: Request, stop: threading.Event) -> None:
    """Serve the page until `stop` is set; raises `GerlError` if that fails."""
    if request.token is not None and not TOKEN.fullmatch(request.token):
        raise ConfigError("token: use ASCII letters, digits and _ - . ~, as they appear in an address")
    if request.port is not None and request.port > 65535:
        raise ConfigError(f"port={request.port}: expected a port, 0 to 65535")
    with importing():
        require("studio", "starlette", "uvicorn")
        from gerl.web.server import serving, stop_on_signals
        from gerl.web.studio.app import build_studio
    token = request.token
    if token is None and not is_loopback(request.host):
        token = secrets.token_urlsafe(24)
    app, studio = build_studio(request.folder, token)
    listener = opened(request.host, request.port)
    studio.store.opened_at(addresses(request.host, listener, None)[0])
    with serving(app, listener, CLOSING) as thread:
        stop_on_signals(stop)
        threading.Thread(target=studio.jobs.watch, args=(stop,), name="jobs", daemon=True).start()
        threading.Thread(target=lambda: studio.menu, name="menu", daemon=True).start()  # it takes seconds
        logger.info("%s", "\n".join(addresses(request.host, listener, None)))
        if token is not None:
            logger.info("token: %s", token)
        logger.info("Ctrl-C closes the page, not the runs")
        try:
            while not stop.wait(LOOK):
                if not thread.is_alive():
                    raise GerlError("the studio's server stopped: see its log")
        finally:
            studio.closing.set()
            studio.site.closing.set()
            studio.sampler.close()
