"""HTTP interface of a vote service: scores for the run, and the voting page.

Paths: `POST /v1/score`, `POST /v1/hello` for the run (the protocol of `reward_models.scorers.vote`). Below a voter's
link, for the page or a voting program: the page, `GET events` (server-sent after each change: `data:` is JSON with
`group` or null, `progress` and `undo`), `GET images/GROUP/N.png`, and as application/json `POST vote` with {"group":
id, "ranks": [2, 1, 2]}, `POST undo` and `POST touch` with {}. Errors are {"error": sentence}.
"""

import asyncio
import contextlib
import json
import logging
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse

from gerl.config.bounded_text import read_json
from gerl.errors import GerlError, RewardError
from gerl.rewards.scorers.base import VERSION, decode_base64
from gerl.utils.files import reason, writing
from gerl.utils.serving import is_loopback
from gerl.web.server import Gate, Queue, Subscriber, Visit, bearer, is_token, refused, serving
from reward_models.votes.ballots import MOST, Ballot, Ballots, VoteRefused, parse_request

# --- Access control of a vote service: tokens of the voters and of the run

NAME = "vote"  # the scorer that receives the votes
FILE = "tokens.json"
ANYBODY = "voter"  # default name of the voter
MAX_IMAGES, MAX_VOTE = 512 * 10**6, 64 * 10**3  # maximum bytes of a request of the run, and of a voter
LINK = re.compile(r"^/vote/([^/]+)/([^/]+)(/.*)?$")


@dataclass
class Tokens:
    """Tokens of the run and of voters by name; without tokens, everyone on this machine is admitted."""

    folder: Path
    loopback: bool = True
    run: str | None = None
    voters: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path, host: str, names: Sequence[str]) -> "Tokens":
        """Load or create tokens for the voters `names`, reusing those of an earlier service.

        No tokens are used on the loopback interface without named voters. Raises `GerlError` if the file cannot be
        read.
        """
        if not names and is_loopback(host):
            return cls(folder)
        values = _read(folder / FILE)
        stored = values.get("voters")
        voters = stored if isinstance(stored, Mapping) else {}
        tokens = {name: str(voters.get(name) or secrets.token_urlsafe(16)) for name in names or [ANYBODY]}
        return cls(folder, is_loopback(host), str(values.get("run") or secrets.token_urlsafe(24)), tokens)

    @property
    def path(self) -> Path:
        return self.folder / FILE

    def keep(self) -> None:
        """Save the tokens for later services, readable by this user only."""
        if self.run is None or (self.path.exists() and _read(self.path) == self._values()):
            return
        with writing(self.path):
            self.folder.mkdir(parents=True, exist_ok=True)
            part = self.path.with_suffix(".part")
            part.unlink(missing_ok=True)
            with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                json.dump(self._values(), file)
            part.replace(self.path)

    def _values(self) -> dict[str, object]:
        return {"run": self.run, "voters": self.voters}

    def links(self, url: str) -> dict[str, str]:
        """Return the link of each voter."""
        if self.run is None:
            return {ANYBODY: f"{url}/"}
        return {name: f"{url}/vote/{name}/{token}/" for name, token in self.voters.items()}

    def admit(self, request: Request) -> Visit | Response:
        """Admit the run by its token, and voters by the secret in the path of their links."""
        path: str = request.scope["path"]
        if path.startswith("/v1/"):
            if self.run is None or is_token(bearer(request.headers), self.run):
                return Visit(path, MAX_IMAGES)
            words = "this service requires its token, and none or another was sent: set it in token_file or token_env"
            return refused(401, words, {"WWW-Authenticate": "Bearer"})
        if self.run is None:
            return Visit(path, MAX_VOTE, ANYBODY)
        match = LINK.match(path)
        if match is None or not is_token(match[2], self.voters.get(match[1])):
            return refused(401, "this is not the link of a voter: use the one that gerl vote printed")
        return Visit(match[3], MAX_VOTE, match[1]) if match[3] else RedirectResponse(path + "/")


def _read(path: Path) -> dict[str, object]:
    try:
        values = read_json(path) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise GerlError(f"{path} cannot be read ({reason(error)}): remove it, and voters get new links") from None
    return values if isinstance(values, dict) else {}


# --- The voting page, and the requests of the run

logger = logging.getLogger("gerl")
PAGE = Path(__file__).parent / "page"
KINDS = {"index.html": "text/html", "vote.css": "text/css", "vote.js": "text/javascript", "order.js": "text/javascript"}
CLOSING = 2.0  # seconds for requests in progress when the service ends
LOOK = 5.0  # seconds after which a page is updated even without changes
PNG = b"\x89PNG\r\n\x1a\n"
Strict = ConfigDict(extra="forbid", strict=True)


class Score(BaseModel):
    """Request for the scores of a group, as sent by the scorer."""

    model_config = ConfigDict(extra="forbid")

    scorer: Literal["vote"]
    images: Annotated[list[str], Field(max_length=MOST)]
    sources: Annotated[list[str], Field(max_length=MOST)] = []
    prompts: Annotated[list[str], Field(min_length=1, max_length=1)]
    metadata: list[dict[str, Any]]
    group: dict[str, Any]


class Ranks(BaseModel):
    """Vote: a rank from 1 for each image of a group; all 1 if skipped."""

    model_config = Strict

    group: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    ranks: Annotated[list[int], Field(max_length=MOST)]


def build_app(ballots: Ballots, tokens: Tokens) -> FastAPI:
    """Build the application of `ballots`; every change of them runs in its event loop."""
    app = FastAPI(title="gerl vote", version=VERSION, docs_url=None, redoc_url=None, openapi_url=None)
    pages: set[Subscriber] = set()

    def changed() -> None:
        for page in list(pages):
            page.wake()

    ballots.changed = changed
    queue = Queue(size=2 * MAX_IMAGES)
    app.add_middleware(Gate, admit=tokens.admit, local=tokens.loopback, queue=queue)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    for kind, status in ((VoteRefused, 409), (RewardError, 422), (GerlError, 500)):
        app.add_exception_handler(kind, partial(_failed, status))
    _add_run(app, ballots, tokens)

    @app.get("/events")
    async def events(request: Request) -> Response:
        return StreamingResponse(_stream(ballots, request.state.visitor, pages), media_type="text/event-stream")

    @app.get("/images/{group}/{file}")
    async def image(group: str, file: str) -> Response:
        ballot = ballots.ballots.get(group)
        path = f"images/{group}/{file}"
        if ballot is None or path not in (*ballot.images, *ballot.sources):
            raise HTTPException(404, "there is no such image")
        headers = {"Cache-Control": "private, max-age=86400, immutable"}
        return FileResponse(ballots.folder / path, media_type="image/png", headers=headers)

    @app.post("/vote")
    async def vote(request: Request, given: Ranks) -> Response:
        ballots.vote(request.state.visitor, given.group, given.ranks)
        return JSONResponse(view(ballots, request.state.visitor))

    @app.post("/undo")
    async def undo(request: Request) -> Response:
        ballots.undo(request.state.visitor)
        return JSONResponse(view(ballots, request.state.visitor))

    @app.post("/touch")
    async def touch(request: Request) -> Response:
        ballots.sign(request.state.visitor)
        return JSONResponse({})

    _add_page(app)  # last, because its paths match any other word
    return app


def _add_run(app: FastAPI, ballots: Ballots, tokens: Tokens) -> None:
    @app.post("/v1/hello")
    async def hello() -> Response:
        return JSONResponse({"scorers": [NAME], "version": VERSION})

    @app.post("/v1/score")
    async def score(given: Score) -> Response:
        group = parse_request(given.group)
        files, sources = await asyncio.to_thread(lambda: (_decode(given.images), _decode(given.sources, "source")))
        if files and len(files) != len(group.seeds):
            raise RewardError(f"got {len(files)} images for {len(group.seeds)} seeds: send one per seed")
        if files:
            tokens.keep()
        scores = ballots.ask(group, given.prompts[0], files, sources)
        if isinstance(scores, str):
            return JSONResponse({"waiting": scores, "version": VERSION}, 202)
        return JSONResponse({"scores": {NAME: scores}, "version": VERSION})


def _add_page(app: FastAPI) -> None:
    @app.get("/")
    @app.get("/{name}")
    async def part(name: str = "index.html") -> Response:
        if name not in KINDS:
            raise HTTPException(404, "there is no such page")
        return Response((PAGE / name).read_bytes(), media_type=KINDS[name])


def view(ballots: Ballots, voter: str) -> dict[str, Any]:
    """Return the content of a voter's page: the group, the next one, progress, and whether a vote can be undone."""
    current, following = ballots.next(voter)
    last = ballots.last_vote(voter)
    return {
        "voter": voter,
        "group": _ballot_json(current),
        "next": _ballot_json(following),
        "undo": None if last is None else {"step": last.request.step, "late": last.votes[voter].used},
        "idle": ballots.idle(voter),
        "progress": ballots.progress(),
    }


def _ballot_json(ballot: Ballot | None) -> dict[str, Any] | None:
    if ballot is None:
        return None
    files = {"images": ballot.images, "sources": ballot.sources}
    return {"id": ballot.id, "prompt": ballot.text, "step": ballot.request.step, **files}


async def _stream(ballots: Ballots, voter: str, pages: set[Subscriber]) -> AsyncIterator[str]:
    page, sent = Subscriber(), ""
    pages.add(page)
    ballots.sign(voter)
    try:
        while True:
            text = json.dumps(view(ballots, voter))
            yield f"data: {text}\n\n" if text != sent else ": still here\n\n"
            sent = text
            if not await page.wait(LOOK):
                ballots.sign(voter, active=False)
    finally:
        pages.discard(page)


def _decode(images: list[str], kind: str = "image") -> list[bytes]:
    files = decode_base64(images, kind)
    for i, content in enumerate(files):
        if not content.startswith(PNG):
            raise RewardError(f"{kind} {i} of {len(images)} is not a PNG: send it as one")
    return files


async def _invalid(_: Request, problem: Exception) -> Response:
    assert isinstance(problem, RequestValidationError)
    first = problem.errors()[0]
    if first["type"] == "json_invalid":
        return refused(400, "the body is not JSON: correct the client")
    where = ".".join(str(part) for part in first["loc"] if part != "body") or "the body"
    return refused(422, f"{where}: {first['msg']}")


async def _http_error(_: Request, problem: Exception) -> Response:
    assert isinstance(problem, HTTPException)
    return refused(problem.status_code, str(problem.detail))


async def _failed(status: int, _: Request, problem: Exception) -> Response:
    if status == 500:
        logger.error("%s", problem)
    return refused(status, str(problem))


FAREWELL = 0.3  # seconds in which pages receive the end of the run


@contextlib.contextmanager
def voting(listener: socket.socket, ballots: Ballots, tokens: Tokens) -> Iterator[threading.Thread]:
    """Serve at `listener` within the context; pages receive `ballots.ended` before it ends."""
    try:
        with serving(build_app(ballots, tokens), listener, CLOSING) as thread:
            try:
                yield thread
            finally:
                if ballots.ended:
                    time.sleep(FAREWELL)
    finally:
        ballots.write_preferences()
        ballots.journal.close()
