"""Server of the live page: static files, runs as JSON and images, an event stream, and the buttons."""

import asyncio
import json
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from gerl.config.bounded_text import parse_json
from gerl.errors import GerlError
from gerl.run.checkpoint import alive_since
from gerl.run.page import RunData
from gerl.run.session import COMMANDS, ask
from gerl.utils.pages import page_assets, render
from gerl.web.server import Gate, Visit, admit_page, refused

MARKS = ("config.yaml", "metrics.jsonl")
DEPTH = 4  # outputs/EXPERIMENT/sweeps/TIME/RUN
MOST = 2000  # maximum number of run folders


def is_run(folder: Path) -> bool:
    """Whether `folder` contains files of a run."""
    return any((folder / name).is_file() for name in MARKS)


@dataclass(frozen=True)
class Folders:
    """All run folders below `root`, by relative path; `chosen` is the requested one."""

    root: Path
    chosen: str | None = None

    @classmethod
    def of(cls, folder_or_root: Path) -> "Folders":
        """Return the folders of a run and its siblings, or of all runs in a folder; raises `GerlError`."""
        if not folder_or_root.is_dir():
            raise GerlError(
                f"run={folder_or_root}: there is no such folder; give a run folder, or one with runs, such as outputs/"
            )
        folder = folder_or_root.resolve()
        if not is_run(folder):
            return cls(folder)
        beside = folder.parent.parent if folder.parent.parent.name == "outputs" else folder.parent
        return cls(beside, folder.relative_to(beside).as_posix())

    def runs(self) -> dict[str, Path]:
        """Return the existing run folders, sorted by name."""
        names = dict.fromkeys([self.chosen] if self.chosen else [])
        for path in _below(self.root, DEPTH):
            names.setdefault(path.relative_to(self.root).as_posix())
            if len(names) == MOST:
                break
        return {name: self.root / name for name in sorted(names)}


def _below(folder: Path, depth: int) -> Iterator[Path]:
    if is_run(folder):
        yield folder
        return
    try:
        inside = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False))
    except OSError:
        return
    for name in inside if depth else ():
        if not name.startswith("."):
            yield from _below(folder / name, depth - 1)


logger = logging.getLogger("gerl")
FOREVER = "private, max-age=31536000, immutable"  # for images, whose address changes with their content
PAUSE = 0.5  # seconds between looks for changed files
ALIVE = 15.0  # seconds of silence after which a stream sends a line, to detect closed connections
BODY = 10_000  # maximum bytes of a request


class Unknown(Exception):
    """Error for a run, step or prompt that does not exist."""


class Site:
    """Runs below a folder."""

    def __init__(self, folders: Folders) -> None:
        self.folders = folders
        self.streams = 0  # open event streams
        self.closing = threading.Event()  # ends them
        self._runs: dict[str, RunData] = {}

    def run(self, name: str) -> RunData:
        """Return the run `name`, one of `Folders`: no path is built from a request."""
        if name not in self._runs:
            folders = self.folders.runs()
            if name not in folders:
                raise Unknown(f"there is no run {name[:200]!r} below the watched folder")
            self._runs.setdefault(name, RunData(name, folders[name]))
        return self._runs[name]

    def runs(self) -> dict[str, Any]:
        """Return all runs, running and most recently written first, and the initially selected one."""
        runs = [self.run(name).summary() for name in self.folders.runs()]
        runs.sort(key=lambda run: (run["alive"], run["time"] or "", run["name"]), reverse=True)
        return {"runs": runs, "chosen": self.folders.chosen or (runs[0]["name"] if runs else None)}


def build_site(folders: Folders, token: str | None, local: bool) -> tuple[Starlette, Site]:
    """Build the ASGI application, `local` only for this machine, and its `Site`, which ends the streams."""
    site = Site(folders)
    gate = Middleware(Gate, admit=partial(_admit, token), local=local)
    return Starlette(routes=build_routes(site), middleware=[gate], exception_handlers=REFUSALS), site


def build_routes(site: Site, studio: bool = False) -> list[Route]:
    """Return the routes of the live page; `studio`: whether it links to the studio's pages."""

    def of_run(path: str, make: Callable[[RunData, Request], Any]) -> Route:
        """Route that returns what `make` says of the run in the query; Starlette calls it in a thread."""

        def endpoint(request: Request) -> Response:
            content = make(site.run(request.query_params.get("run", "")), request)
            return content if isinstance(content, Response) else JSONResponse(content)

        return Route(path, endpoint)

    def settings(run: RunData, request: Request) -> Any:
        name = request.query_params.get("other")
        return run.settings(site.run(name) if name else None)

    def series(run: RunData, request: Request) -> Any:
        names = request.query_params.get("names", "").split(",")[:200]
        return run.series(names, *(query_int(request, name) for name in ("since", "width", "generation")))

    def lora(run: RunData, _: Request) -> Response:
        step, body = found_or_404(run.lora())
        return _attachment(run, f"step{step}.safetensors", body)

    def asset(path: str, content: str, media: str) -> Route:
        return Route(path, lambda _: Response(content, media_type=media))

    assets = page_assets()
    return [
        asset("/", render("live.html.j2", studio=studio), "text/html"),
        asset("/page.css", assets["style"], "text/css"),
        asset("/page.js", assets["script"], "text/javascript"),
        Route("/api/runs", lambda _: JSONResponse(site.runs())),
        of_run("/api/run", lambda run, _: run.overview()),
        of_run("/api/series", series),
        of_run("/api/held_out", lambda run, _: run.held_out()),
        of_run("/api/prompt", lambda run, request: found_or_404(run.prompt(query_int(request, "row")))),
        of_run("/api/live", lambda run, request: run.live(query_int(request, "step"))),
        of_run("/api/episodes", lambda run, request: run.episodes(query_int(request, "step"))),
        of_run("/api/timeline", lambda run, request: run.timeline(min(query_int(request, "steps", 3), 100))),
        of_run("/api/warnings", lambda run, _: run.warnings()),
        of_run("/api/settings", settings),
        of_run("/api/log", lambda run, _: run.log()),
        of_run("/trace.json", lambda run, _: _attachment(run, "trace.json", json.dumps(run.trace()))),
        of_run("/lora.safetensors", lora),
        of_run("/held_out", lambda run, r: _image(run.picture(query_int(r, "step"), query_int(r, "row")))),
        of_run("/hacked", lambda run, r: _image(run.hacking_picture(query_int(r, "pair"), query_int(r, "side")))),
        of_run("/sheet", lambda run, request: _image(run.sheet(query_int(request, "step")))),
        of_run("/episodes", lambda run, request: _image(run.sheet(query_int(request, "step"), held_out=True))),
        Route("/api/events", partial(_events, site)),
        Route("/api/control", partial(_control, site), methods=["POST"]),
    ]


async def _failed(status: int, _: Request, error: Exception) -> Response:
    return refused(status, str(error))


REFUSALS = {Unknown: partial(_failed, 404), GerlError: partial(_failed, 409)}


def _admit(token: str | None, request: Request) -> Visit | Response:
    sentence = "open the page with the address that the command printed: it has the token"
    return admit_page(token, BODY, request) or refused(401, sentence)


def query_int(request: Request, name: str, default: int = -1) -> int:
    """Return an integer of the query; raises `Unknown` for anything else."""
    text = request.query_params.get(name, str(default))
    if not text.removeprefix("-").isascii() or not text.removeprefix("-").isdigit() or len(text) > 12:
        raise Unknown(f"{name}={text[:40]!r} is not an integer")
    return int(text)


def found_or_404(content: Any) -> Any:
    """Return `content`; raises `Unknown` if it is None."""
    if content is None:
        raise Unknown("there is no such step or prompt in this run")
    return content


def _image(content: tuple[bytes, str] | None) -> Response:
    body, media = found_or_404(content)
    return Response(body, media_type=media, headers={"Cache-Control": FOREVER})


def _attachment(run: RunData, name: str, body: str | bytes) -> Response:
    media = "application/json" if isinstance(body, str) else "application/octet-stream"
    name = f"gerl-{run.folder.name}-{name}".encode("ascii", "replace").decode().replace('"', "_")
    return Response(body, media_type=media, headers={"Content-Disposition": f'attachment; filename="{name}"'})


def _events(site: Site, request: Request) -> Response:
    run = site.run(request.query_params.get("run", ""))

    async def stream() -> AsyncIterator[str]:
        sent, last = dict[str, str](), time.monotonic()
        site.streams += 1
        try:
            yield "retry: 2000\n\n"
            while not site.closing.is_set():
                now = await run_in_threadpool(run.signatures)
                if now != sent:
                    sent, last = now, time.monotonic()
                    yield f"data: {json.dumps(now)}\n\n"
                elif time.monotonic() - last > ALIVE:
                    last = time.monotonic()
                    yield ": still here\n\n"
                await asyncio.sleep(PAUSE)
        finally:
            site.streams -= 1

    return StreamingResponse(stream(), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})


async def _control(site: Site, request: Request) -> Response:
    try:
        values = parse_json(await request.body())
        name, command = str(values["run"]), values["command"]
    except (ValueError, KeyError, TypeError, ClientDisconnect):
        return refused(400, "expected a JSON object with run and command")
    if command not in COMMANDS:
        return refused(400, f"command: expected one of {', '.join(COMMANDS)}")
    run = await run_in_threadpool(site.run, name)
    if alive_since(run.folder) is None:
        return refused(409, "the run is not training, so it cannot do this")
    await run_in_threadpool(ask, run.folder, command)
    logger.info("%s: requested to %s", name, command)
    return JSONResponse({"asked": command})
