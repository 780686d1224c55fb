"""Who may do what at a vote service: the tokens of voters and run, and requests that no other site may send."""

import hmac
import json
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from gerl.commandline.listening import host_name, is_foreign, is_loopback
from gerl.errors import GerlError
from gerl.rewards.scorers.remote import VERSION
from gerl.utils.files import reason, writing

FILE = "tokens.json"
ANYBODY = "voter"  # the name of who votes where nobody is named
MAX_IMAGES, MAX_VOTE = 512 * 10**6, 64 * 10**3  # bytes of a request of the run, and of a voter
LINK = re.compile(r"^/vote/([^/]+)/([^/]+)(/.*)?$")
NOBODY = secrets.token_urlsafe(24)


@dataclass
class Access:
    """Tokens of the run and of voters by name; without any, whoever reaches this machine's loopback is let in."""

    folder: Path
    loopback: bool = True
    run: str | None = None
    voters: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path, host: str, names: Sequence[str]) -> "Access":
        """Tokens for the voters `names`, where a service before this one had them the same ones.

        None are needed on the loopback where nobody is named. Raises `GerlError` if the file cannot be read.
        """
        if not names and is_loopback(host):
            return cls(folder)
        kept = _read(folder / FILE)
        known = kept.get("voters")
        voters = known if isinstance(known, Mapping) else {}
        tokens = {name: str(voters.get(name) or secrets.token_urlsafe(16)) for name in names or [ANYBODY]}
        return cls(folder, is_loopback(host), str(kept.get("run") or secrets.token_urlsafe(24)), tokens)

    @property
    def path(self) -> Path:
        return self.folder / FILE

    def keep(self) -> None:
        """Write the tokens for the services after this one, readable by this user only."""
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
        """The page of each voter."""
        if self.run is None:
            return {ANYBODY: f"{url}/"}
        return {name: f"{url}/vote/{name}/{token}/" for name, token in self.voters.items()}

    def is_voter(self, name: str, token: str) -> bool:
        """Whether the token is that of the voter; takes as long for any."""
        same = hmac.compare_digest(self.voters.get(name, NOBODY).encode(), token.encode())
        return same and name in self.voters

    def is_run(self, header: str) -> bool:
        """Whether an `Authorization` header is that of the run."""
        kind, _, given = header.partition(" ")
        wanted = self.run or NOBODY
        return hmac.compare_digest(given.strip().encode(), wanted.encode()) and kind.lower() == "bearer"


def _read(path: Path) -> dict[str, object]:
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise GerlError(f"{path} cannot be read ({reason(error)}): remove it, and voters get new links") from None
    return found if isinstance(found, dict) else {}


class Gate:
    """ASGI middleware: lets in who may come in, and says to the application who it is (`scope["state"]["voter"]`)."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self.app, self.access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers, path, access = Headers(scope=scope), scope["path"], self.access
        refused = self._foreign(headers, scope["method"]) or _wrong_body(headers, scope["method"], path)
        if refused is None and path.startswith("/v1/"):
            if access.run is not None and not access.is_run(headers.get("authorization", "")):
                words = (
                    "the token of this service is wanted, and none or another came: name it in token_file or token_env"
                )
                refused = error(401, words, {"WWW-Authenticate": "Bearer"})
        elif refused is None:
            voter, path = self._voter(path)
            if voter is None:
                refused = error(401, "this is no link of a voter: use the one that gerl vote printed")
            elif path == "":
                refused = RedirectResponse(scope["path"] + "/")
            scope = {**scope, "path": path, "state": {**scope.get("state", {}), "voter": voter}}
        await (self.app if refused is None else refused)(scope, receive, send)

    def _voter(self, path: str) -> tuple[str | None, str]:
        """The voter whose link begins the path, and what is behind the link."""
        match = LINK.match(path)
        if self.access.run is None:
            return ANYBODY, path
        if match is None or not self.access.is_voter(match[1], match[2]):
            return None, path
        return match[1], match[3] or ""

    def _foreign(self, headers: Headers, method: str) -> Response | None:
        """Refuse what another site sends, also by a name of its own for this machine."""
        host = headers.get("host", "")
        if self.access.loopback and not is_loopback(host_name(host)):
            return error(403, f"the host {host!r:.80} is none of this machine: use 127.0.0.1 or localhost")
        if is_foreign(method, headers):
            origin = headers.get("origin")
            return error(403, f"the request comes from another site, {origin!r:.80}: use the page of this service")
        return None


def _wrong_body(headers: Headers, method: str, path: str) -> Response | None:
    """Refuse a body that is too large, or of a kind that a form of another site could send."""
    if method in ("GET", "HEAD"):
        return None
    most = MAX_IMAGES if path.startswith("/v1/") else MAX_VOTE
    length = headers.get("content-length", "")
    if not (length.isascii() and length.isdigit()):
        return error(411, "the request does not say how long its body is: send Content-Length")
    if int(length[:20]) > most:
        return error(413, f"the request has {length[:20]} bytes, at most {most} may come: send smaller images")
    if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        return error(415, "the body is no JSON: send Content-Type: application/json")
    return None


def error(status: int, sentence: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """An error as JSON."""
    return JSONResponse({"error": sentence, "version": VERSION}, status, headers)
