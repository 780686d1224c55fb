"""Start, watch, compare and export runs in a browser: `gerl studio [folder=FOLDER] [key=value ...]`."""

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gerl.commandline.arguments import Parser, key
from gerl.commandline.command import run_command
from gerl.utils.imports import importing
from gerl.web.watch import PageOptions, addresses, checked_token, opened, serve_app

logger = logging.getLogger("gerl")


@dataclass(frozen=True, kw_only=True)
class Request(PageOptions):
    """Command-line options."""

    folder: Path = key("the folder of the runs, which is made if it is missing", Path("outputs"))
    trust: bool = key("true: accept a studio.json of another user or folder, with its commands and code", False)


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
    token = checked_token(request, "studio", runs_code=True)
    with importing():
        from gerl.web.studio.app import build_studio

    with opened(request.host, request.port) as listener:
        app, studio = build_studio(request.folder, token, request.local, request.trust)
        studio.store.write_address(addresses(request.host, listener, None)[0])
        threading.Thread(target=studio.jobs.watch, args=(stop,), name="jobs", daemon=True).start()
        threading.Thread(target=lambda: studio.menu, name="menu", daemon=True).start()  # it takes seconds
        logger.info("%s\nCtrl-C stops the page; runs continue", "\n".join(addresses(request.host, listener, token)))
        try:
            serve_app(app, listener, stop, studio.closing, studio.site.closing)
        finally:
            studio.sampler.close()
