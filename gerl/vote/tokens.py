"""Who may do what at a vote service: the tokens of the voters and of the run."""

import json
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from gerl.commandline.gate import Visit, bearer, is_token, refused
from gerl.commandline.listening import is_loopback
from gerl.errors import GerlError
from gerl.utils.files import reason, writing

FILE = "tokens.json"
ANYBODY = "voter"  # the name of who votes where nobody is named
MAX_IMAGES, MAX_VOTE = 512 * 10**6, 64 * 10**3  # bytes of a request of the run, and of a voter
LINK = re.compile(r"^/vote/([^/]+)/([^/]+)(/.*)?$")


@dataclass
class Tokens:
    """Tokens of the run and of voters by name; without any, whoever reaches this machine's loopback is let in."""

    folder: Path
    loopback: bool = True
    run: str | None = None
    voters: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path, host: str, names: Sequence[str]) -> "Tokens":
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

    def admit(self, request: Request) -> Visit | Response:
        """Let the run in by its token, and voters by their links, whose paths are those of the page behind them."""
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
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise GerlError(f"{path} cannot be read ({reason(error)}): remove it, and voters get new links") from None
    return found if isinstance(found, dict) else {}
