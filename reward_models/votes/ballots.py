"""State of a vote service: groups, votes, ranks, and the journal on disk."""

import hashlib
import importlib.util
import io
import json
import logging
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from io import FileIO
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from gerl.config.bounded_text import LARGEST_LOG, MALFORMED, load_json, regular
from gerl.errors import GerlError, RewardError
from gerl.utils.files import reason, write_file, writing

# --- A group to vote on, as described by the run, and its votes

Hex = Annotated[str, Field(pattern=r"^[0-9a-f]{8,64}$")]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
MOST = 256  # images of a group, and groups of a step: more is too much work for people


@dataclass(frozen=True, kw_only=True)
class VoteRequest:
    """Group as described by the run; see `gerl.protocol.FeedbackRequest`. `digests`: hashes of its images."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    key: Hex
    run: Annotated[str, Field(max_length=400)]
    step: Annotated[int, Field(ge=0, lt=2**53)]
    prompt: Annotated[int, Field(ge=-(2**53), lt=2**53)]
    seeds: Annotated[list[Seed], Field(min_length=2, max_length=MOST)]
    digests: Annotated[list[Hex], Field(min_length=2, max_length=MOST)]
    together: Annotated[list[Hex], Field(max_length=10 * MOST)]

    @property
    def id(self) -> str:
        """Identifier of the group including its images: another set of images for the same key is another group."""
        return hashlib.sha256("/".join([self.key, *self.digests]).encode()).hexdigest()[:16]


ASKED = TypeAdapter(VoteRequest)


def parse_request(values: object) -> VoteRequest:
    """Parse `values` from a request or the journal; raises `RewardError` if they are invalid."""
    try:
        request = ASKED.validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(["group", *map(str, first["loc"])])
        raise RewardError(f"{where}: {first['msg']} (is the run of another version of gerl?)") from None
    if len(request.digests) != len(request.seeds):
        raise RewardError(f"group: {len(request.digests)} digests for {len(request.seeds)} seeds: send one per image")
    return request


@dataclass(frozen=True)
class Vote:
    """Ranks `[B]` by a voter, from 1 for the best, ties sharing a rank; `time` is in seconds since 1970."""

    voter: str
    ranks: list[int]
    time: float
    used: bool = False  # the run has trained on it


@dataclass(frozen=True, kw_only=True)
class Preference:
    """Vote on a group of N images: `ranks` `[N]` from 1 for the best, ties sharing a rank; all 1 if skipped.

    images: `[N]` PNGs, relative to the file's folder; sources: PNGs of the prompt's condition images. time: seconds
    since 1970. used: the run has trained on it.
    """

    run: str
    step: int
    prompt_id: int
    prompt: str
    images: list[str]
    sources: list[str]
    seeds: list[int]
    ranks: list[int]
    voter: str
    time: float
    used: bool


@dataclass
class Ballot:
    """Group with its votes by voter, and the files of its images, relative to the folder of the votes.

    sources: files of the prompt's condition images, such as the source of an edit.
    """

    request: VoteRequest
    text: str  # the prompt
    images: list[str]
    sources: list[str] = field(default_factory=list)
    votes: dict[str, Vote] = field(default_factory=dict)
    taken: bool = False  # the run has received the scores
    seen: float = field(default_factory=time.monotonic)  # when the run last requested its scores
    holder: str | None = None  # the voter to whom it is shown
    until: float = 0.0  # end of the exclusive lease of `holder`

    @property
    def id(self) -> str:
        return self.request.id

    def row(self) -> dict[str, Any]:
        """Return its line of the journal."""
        row = {"kind": "group", "group": asdict(self.request), "text": self.text, "images": self.images}
        return {**row, "sources": self.sources} if self.sources else row


FILE = re.compile(r"images/[0-9a-f]+/(source_)?\d+\.png")


def write_images(folder: Path, group: VoteRequest, files: Sequence[bytes], kind: str = "") -> list[str]:
    """Write the PNGs of a group, before the journal refers to them; return their paths in `folder`."""
    paths = [f"images/{group.id}/{kind}{i}.png" for i in range(len(files))]
    (folder / "images" / group.id).mkdir(parents=True, exist_ok=True)
    for path, content in zip(paths, files, strict=True):
        (folder / path).write_bytes(content)
    return paths


# --- State of a vote service: open groups, leases and votes
#
# Every event is in the journal before it is answered, so that a restarted service continues without loss.

logger = logging.getLogger("gerl")
LAST_TIME = 2.5e11  # seconds since 1970, in the year 9892
HERE = 60.0  # seconds of silence after which a voter, or a run that requests a group, counts as gone
UNASKED = 600.0  # seconds after which announced groups that the run has not requested are no longer waited for


class VoteRefused(GerlError):
    """Error for an impossible vote or undo, in words for the voter."""


@dataclass
class Rules:
    """Voting rules.

    votes: by different people, required per group. lease: seconds for which a group is reserved for one voter. undo:
    seconds for which the last vote of a step can be undone. steps: of the run, if known.
    """

    votes: int = 1
    lease: float = 120.0
    undo: float = 3.0
    steps: int | None = None


@dataclass
class Ballots:
    """Groups and votes in `folder`; calls `changed` after each change; `clock` returns seconds."""

    folder: Path
    rules: Rules = field(default_factory=Rules)
    changed: Callable[[], None] = lambda: None
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.journal = Journal(self.folder)
        self.ballots: dict[str, Ballot] = {}  # by id, in order of arrival
        self.newest: dict[str, str] = {}  # key -> id: a group sampled again with other pixels replaces the old one
        self.last: dict[str, list[str]] = {}  # voter -> ids voted on, newest last
        self.voters: dict[str, float] = {}  # when each voter's page last reported
        self.active: dict[str, float] = {}  # when each voter was last active
        self.asking = -HERE  # when the run last asked
        self.voted = 0.0  # time of the last vote
        self.step, self.ended = 0, ""
        for row in self.journal.replay():
            self._apply(row)

    def _apply(self, row: dict[str, Any]) -> None:
        """Apply a line of the journal; raises `GerlError` if it is inconsistent."""
        try:
            match row["kind"]:
                case "group":
                    files = row["images"], row.get("sources", [])
                    if not all(FILE.fullmatch(file) for part in files for file in part):
                        raise ValueError("an image outside its folder")
                    self._add(Ballot(parse_request(row["group"]), str(row["text"]), *files, seen=self.clock()))
                case "vote":
                    ballot = self.ballots[row["group"]]
                    ranks = normalised_ranks(row["ranks"], len(ballot.images))
                    if not 0 <= (time_of := float(row["time"])) < LAST_TIME:
                        raise ValueError("a time that no calendar has")
                    ballot.votes[row["voter"]] = Vote(str(row["voter"]), ranks, time_of)
                    self._forget(row["voter"], ballot.id).append(ballot.id)
                case "undo":
                    del self.ballots[row["group"]].votes[row["voter"]]
                    self._forget(row["voter"], row["group"])
                case "taken":
                    for name in row["groups"]:
                        self._take(self.ballots[name])
        except (*MALFORMED, RewardError) as error:
            raise GerlError(f"{self.journal.path} has an inconsistent line ({error}): move it away") from None

    def _add(self, ballot: Ballot) -> None:
        self.ballots[ballot.id] = ballot
        self.newest[ballot.request.key] = ballot.id
        self.step = max(self.step, ballot.request.step)

    def _forget(self, voter: str, name: str) -> list[str]:
        ballots = self.last.setdefault(voter, [])
        if name in ballots:
            ballots.remove(name)
        return ballots

    def _take(self, ballot: Ballot) -> None:
        ballot.taken = True
        ballot.votes = {v.voter: Vote(v.voter, v.ranks, v.time, used=True) for v in ballot.votes.values()}

    def _write(self, row: dict[str, Any]) -> None:
        self.journal.append({**row, "time": row.get("time", time.time())})
        self._apply(row)
        self.changed()

    # --- requests of the run

    def ask(
        self, group: VoteRequest, text: str, files: Sequence[bytes], sources: Sequence[bytes] = ()
    ) -> list[float] | str:
        """Return the scores `[B]` of a group, or what is missing: "images" or "votes".

        Scores are returned once all groups of the same request are decided; until then votes can be undone. Raises
        `GerlError` if a file cannot be written.
        """
        self.asking, self.step = self.clock(), group.step
        if group.id not in self.ballots:
            if not files:
                return "images"
            with writing(self.folder / "images"):
                paths = write_images(self.folder, group, files)
                beside = write_images(self.folder, group, sources, "source_")
            self._write(Ballot(group, text, paths, beside).row())
        ballot = self.ballots[group.id]
        ballot.seen = self.clock()
        self.newest[group.key] = ballot.id
        if not self._decided(ballot) or not self._complete(group):
            return "votes"
        if not ballot.taken:
            names = [
                name for key in group.together if (name := self.newest.get(key)) and self._decided(self.ballots[name])
            ]
            self._write({"kind": "taken", "groups": list(dict.fromkeys([*names, ballot.id]))})
            self.write_preferences()
        return mean_scores([vote.ranks for vote in ballot.votes.values() if vote.used])

    def _decided(self, ballot: Ballot) -> bool:
        return ballot.taken or len(ballot.votes) >= self.rules.votes

    def _complete(self, group: VoteRequest) -> bool:
        """Whether all groups of the same request have their votes, and none can be undone any more."""
        newest = [self.newest.get(key) for key in group.together]
        now, since = self.clock(), self.voted
        if any(name is not None and not self._decided(self.ballots[name]) for name in newest):
            return False
        if any(name is not None and self.ballots[name].taken for name in newest):
            return True
        return now - since >= (UNASKED if None in newest else self.rules.undo)

    # --- requests of voters

    def sign(self, voter: str, active: bool = True) -> None:
        """Record that a voter's page is open; if `active`, the voter did something, which renews the lease."""
        now, news = self.clock(), voter not in self.present() or (active and self.idle(voter))
        self.voters[voter] = now
        if active:
            self.active[voter] = now
            if (held := self._ballot_of(voter)) is not None:
                held.until = now + self.rules.lease
        if news:
            self.changed()

    def idle(self, voter: str) -> bool:
        """Whether a voter has been inactive for the lease while other voters are present."""
        away = self.clock() - self.active.get(voter, -self.rules.lease) >= self.rules.lease
        return away and any(other != voter for other in self.present())

    def present(self) -> list[str]:
        """Return the voters who are present."""
        return [voter for voter, seen in self.voters.items() if self.clock() - seen < HERE]

    def open(self) -> list[Ballot]:
        """Return the groups that need votes, oldest step first."""
        now = self.clock()
        asking = now - self.asking < HERE
        wanted = [
            ballot
            for ballot in self.ballots.values()
            if not self._decided(ballot)
            and self.newest[ballot.request.key] == ballot.id
            and not (asking and now - ballot.seen > HERE)
        ]
        return sorted(wanted, key=lambda ballot: ballot.request.step)

    def _ballot_of(self, voter: str) -> Ballot | None:
        return next((b for b in self.open() if b.holder == voter and voter not in b.votes), None)

    def next(self, voter: str) -> tuple[Ballot | None, Ballot | None]:
        """Return the group to show to a voter, which is then leased to them, and the probable next one."""
        now, held = self.clock(), self._ballot_of(voter)
        free = [b for b in self.open() if voter not in b.votes and (b.holder in (None, voter) or b.until <= now)]
        if held is None and free and not self.idle(voter):
            held = free[0]
            held.holder, held.until = voter, now + self.rules.lease
        return held, next((ballot for ballot in free if ballot is not held), None)

    def vote(self, voter: str, name: str, ranks: Sequence[int]) -> None:
        """Store the vote on group `name`, replacing an earlier one by the same voter. Raises `VoteRefused`."""
        ballot = self.ballots.get(name)
        if ballot is None:
            raise VoteRefused("there is no such group: reload the page")
        try:
            normalised = normalised_ranks(ranks, len(ballot.images))
        except RewardError as error:
            raise VoteRefused(str(error)) from None
        if voter in ballot.votes and ballot.votes[voter].used:
            raise VoteRefused(f"step {ballot.request.step} has already been trained with your vote on it")
        self.sign(voter)
        ballot.holder, self.voted = None, self.clock()
        self._write({"kind": "vote", "group": name, "voter": voter, "ranks": normalised, "time": time.time()})

    def last_vote(self, voter: str) -> Ballot | None:
        """Return the group of the voter's last vote, None if missing; it cannot be undone if the group is `taken`."""
        votes = self.last.get(voter)
        return self.ballots[votes[-1]] if votes else None

    def undo(self, voter: str) -> None:
        """Undo the last vote of a voter and show them the group again; raises `VoteRefused` if it is too late."""
        ballot = self.last_vote(voter)
        if ballot is None:
            raise VoteRefused("there is no vote to undo")
        if ballot.votes[voter].used:
            raise VoteRefused(f"too late: step {ballot.request.step} has been trained with that vote")
        if (held := self._ballot_of(voter)) is not None:
            held.holder = None
        ballot.holder, ballot.until = voter, self.clock() + self.rules.lease
        self._write({"kind": "undo", "group": ballot.id, "voter": voter})

    def progress(self) -> dict[str, Any]:
        """Return the progress of run and voters, for the page."""
        waiting = self.open()
        step = waiting[0].request.step if waiting else self.step
        current = [b for b in self.ballots.values() if b.request.step == step and self.newest[b.request.key] == b.id]
        count = len(current[-1].request.together) if current else 0
        return {
            "step": step,
            "steps": self.rules.steps,
            "waiting": len(waiting),
            "decided": sum(map(self._decided, current)),
            "groups": max(count, len(current)),
            "voters": len(self.present()),
            "votes": sum(len(ballot.votes) for ballot in self.ballots.values()),
            "asking": self.clock() - self.asking < HERE,
            "ended": self.ended,
        }

    def end(self, message: str) -> None:
        """Mark the run as ended; `message` tells voters how."""
        self.ended = message
        self.changed()

    def preferences(self) -> list[Preference]:
        """Return all votes, in the order of the groups."""
        return [
            Preference(
                run=ballot.request.run,
                step=ballot.request.step,
                prompt_id=ballot.request.prompt,
                prompt=ballot.text,
                images=ballot.images,
                sources=ballot.sources,
                seeds=ballot.request.seeds,
                ranks=vote.ranks,
                voter=vote.voter,
                time=vote.time,
                used=vote.used,
            )
            for ballot in self.ballots.values()
            for vote in ballot.votes.values()
        ]

    def write_preferences(self) -> Path | None:
        """Write the votes as a preference file, if any; a failure is only a warning, as the journal has all votes."""
        try:
            return write_preferences(self.folder, self.preferences())
        except GerlError as error:
            logger.warning("%s", error)
            return None


# --- Journal of a vote service: a line per event, on disk before the answer is sent

NAME = "journal.jsonl"


class Journal:
    """Append-only JSON lines in `folder`, created with the first line; a restarted service replays them."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self._file: FileIO | None = None

    def replay(self) -> list[dict[str, Any]]:
        """Return all rows; drop an incomplete last line left by a power failure.

        Raises `GerlError` if the file cannot be read.
        """
        if not self.path.exists():
            return []
        try:
            content = regular(self.path, LARGEST_LOG).read_bytes()
            end = content.rfind(b"\n") + 1
            if end < len(content):
                logger.warning("%s ends with an incomplete line, which is ignored", self.path)
                with self.path.open("r+b") as file:
                    file.truncate(end)
            rows = [load_json(line) for line in content[:end].splitlines()]
        except (OSError, ValueError) as error:
            raise GerlError(f"{self.path} cannot be read ({reason(error)}): repair it, or move it away") from None
        if any(not isinstance(row, dict) or "kind" not in row for row in rows):
            raise GerlError(f"{self.path} is not a journal of votes: move it away")
        return rows

    def append(self, row: dict[str, Any]) -> None:
        """Append a row and sync it to disk. Raises `GerlError` if that fails; the file is then unchanged."""
        line = json.dumps(row, ensure_ascii=False).encode() + b"\n"
        with writing(self.path):
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self.path.open("ab", buffering=0)  # a failed row must not remain in a buffer
            end = os.fstat(self._file.fileno()).st_size
            try:
                while line:
                    line = line[self._file.write(line) :]
                os.fsync(self._file.fileno())
            except OSError:
                self._file.truncate(end)
                raise

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


# --- Ranks from 1 for the best, and their scores

SKIPPED = 0.5  # score of all images if they are all equal


def normalised_ranks(ranks: Sequence[int], count: int) -> list[int]:
    """Return ranks `[count]` without gaps: 1, 2, ...; ties share one. Raises `RewardError` for invalid ranks."""
    if len(ranks) != count or any(not 1 <= rank <= count for rank in ranks):
        raise RewardError(f"ranks {list(ranks)!r:.80}: expected one from 1 to {count} for each of the {count} images")
    levels = sorted(set(ranks))
    return [levels.index(rank) + 1 for rank in ranks]


def scores(ranks: Sequence[int]) -> list[float]:
    """Return scores from 1 for the first rank to 0 for the last, evenly spaced; all 0.5 if there is only one rank."""
    last = max(ranks)
    return [SKIPPED if last == 1 else 1 - (rank - 1) / (last - 1) for rank in ranks]


def mean_scores(votes: Sequence[Sequence[int]]) -> list[float]:
    """Return the mean scores `[B]` over the votes `[V, B]` on a group."""
    columns = zip(*(scores(ranks) for ranks in votes), strict=True)
    return [sum(column) / len(column) for column in columns]


# --- Votes as a preference file: `preferences.parquet`, or `.jsonl` without pyarrow; schema in docs/vote.md

STEM = "preferences"


def write_preferences(folder: Path, rows: Sequence[Preference]) -> Path | None:
    """Write all votes atomically; return the file, None without votes. Raises `GerlError` if that fails."""
    if not rows:
        return None
    values = [asdict(row) for row in rows]
    if importlib.util.find_spec("pyarrow") is None:
        path = folder / f"{STEM}.jsonl"
        write_file(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in values))
        return path
    path = folder / f"{STEM}.parquet"
    write_file(path, _parquet(values))
    return path


def _parquet(values: list[dict[str, Any]]) -> bytes:
    import pyarrow
    import pyarrow.parquet

    schema = pyarrow.schema(
        {
            "run": pyarrow.string(),
            "step": pyarrow.int64(),
            "prompt_id": pyarrow.int64(),
            "prompt": pyarrow.string(),
            "images": pyarrow.list_(pyarrow.string()),
            "sources": pyarrow.list_(pyarrow.string()),
            "seeds": pyarrow.list_(pyarrow.int64()),
            "ranks": pyarrow.list_(pyarrow.int64()),
            "voter": pyarrow.string(),
            "time": pyarrow.timestamp("us", tz="UTC"),
            "used": pyarrow.bool_(),
        }
    )
    rows = [{**row, "time": round(row["time"] * 1e6)} for row in values]
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema=schema), buffer)
    return buffer.getvalue()
