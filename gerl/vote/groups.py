"""A group that people are asked about, as the run describes it, with the votes on it."""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from gerl.errors import RewardError

Hex = Annotated[str, Field(pattern=r"^[0-9a-f]{8,64}$")]
MOST = 256  # images of a group, and groups of a step: more is no work for people


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A group as the run describes it; see `gerl.protocol.Occasion`. `digests`: of the content of its images."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    key: Hex
    run: Annotated[str, Field(max_length=400)]
    step: Annotated[int, Field(ge=0)]
    prompt: int
    seeds: Annotated[list[int], Field(min_length=2, max_length=MOST)]
    digests: Annotated[list[Hex], Field(min_length=2, max_length=MOST)]
    together: Annotated[list[Hex], Field(max_length=10 * MOST)]

    @property
    def id(self) -> str:
        """Names the group with the content of its images: others of the same key are another group."""
        return hashlib.sha256("/".join([self.key, *self.digests]).encode()).hexdigest()[:16]


ASKED = TypeAdapter(Asked)


def asked(values: object) -> Asked:
    """`values` from a request or the journal; raises `RewardError` for anything else."""
    try:
        found = ASKED.validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(["group", *map(str, first["loc"])])
        raise RewardError(f"{where}: {first['msg']} (is the run of another version of gerl?)") from None
    if len(found.digests) != len(found.seeds):
        raise RewardError(f"group: {len(found.digests)} digests for {len(found.seeds)} seeds: send one per image")
    return found


@dataclass(frozen=True)
class Vote:
    """Ranks `[B]` from 1 for the best, ties share one, of a voter at a time (seconds since 1970)."""

    voter: str
    ranks: list[int]
    time: float
    used: bool = False  # the run has learned from it


@dataclass
class Ballot:
    """A group with the files of its images, relative to the folder of the votes, and the votes, by voter.

    sources: pictures that the prompt comes with, such as the one that is edited; files too.
    """

    asked: Asked
    text: str  # the prompt
    images: list[str]
    sources: list[str] = field(default_factory=list)
    votes: dict[str, Vote] = field(default_factory=dict)
    taken: bool = False  # the run has the scores
    seen: float = field(default_factory=time.monotonic)  # when the run asked the last time
    holder: str | None = None  # the voter to whom it is shown
    until: float = 0.0  # as long as nobody else is

    @property
    def id(self) -> str:
        return self.asked.id

    def row(self) -> dict[str, Any]:
        """Its line of the journal."""
        row = {"kind": "group", "group": asdict(self.asked), "text": self.text, "images": self.images}
        return {**row, "sources": self.sources} if self.sources else row


def write_images(folder: Path, group: Asked, files: Sequence[bytes], kind: str = "") -> list[str]:
    """Write PNGs of a group, so that they are on disk before the journal names them; their paths in `folder`."""
    paths = [f"images/{group.id}/{kind}{i}.png" for i in range(len(files))]
    (folder / "images" / group.id).mkdir(parents=True, exist_ok=True)
    for path, content in zip(paths, files, strict=True):
        (folder / path).write_bytes(content)
    return paths
