"""The job queue of the studio: commands of gerl, run one at a time on each GPU, in processes that outlive the server.

Jobs are recorded in `studio.json`, and their logs and exit codes in their folders, so that a server started again
continues with the same jobs.
"""

import contextlib
import fcntl
import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from gerl.config.bounded_text import LARGEST_JSON, load_json, read_text, regular
from gerl.errors import ConfigError, GerlError, TrustError
from gerl.run.card import hardware, now, redact
from gerl.utils.files import reason, write_file

logger = logging.getLogger("gerl")
State = Literal["waiting", "running", "finished", "failed", "stopped", "killed"]
FILE, FOLDER = "studio.json", "studio"  # in the folder of the runs
SIGNATURE, KEY = "signature", 32  # of the other values of the file; bytes of the key
LOG, EXIT, PID = "log.txt", "exit", "pid"  # in the folder of a job
LOOK = 0.3  # seconds between polls
VISIBLE = "CUDA_VISIBLE_DEVICES"
STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
TAIL = 20_000  # bytes of a log that are read
# The first shell that creates the file `pid` runs the job, and another one ends: a job runs once, whatever was killed
# in between. The exit code outlives the page, and replaces a placeholder in its place, so that it needs no room on a
# full disk. No pipe or terminal of the page is held. The command handles the signals, for which the shell waits.
SHELL = """
set -C; echo "$$ $(cut -d " " -f 22 /proc/$$/stat)" 2> /dev/null > "$0/pid" || exit 75
set +C; mask=$(umask); umask 077
exec > "$0/log.txt" 2>&1; printf "?   " > "$0/exit" || exit 74
umask "$mask"; trap : INT TERM; "$@"; code=$?
printf "%-4s" "$code" 1<> "$0/exit"; exit "$code"
"""


@dataclass
class Job:
    """A command of gerl and its process."""

    id: int
    command: str  # train, evaluate, score, ...
    arguments: list[str]
    title: str
    created: str
    gpus: int = 1  # that it uses, if the machine has any; 0: it starts at once
    devices: list[str] = field(default_factory=list)  # assigned to it
    pid: int | None = None
    clock: int | None = None  # start of the process in clock ticks since the machine started
    started: str | None = None
    ended: str | None = None
    code: int | None = None  # None at its end: the process was killed
    run: str | None = None  # name of the run that it trains
    stopping: bool = False  # SIGINT was sent

    @property
    def state(self) -> State:
        if self.ended is None:
            return "waiting" if self.pid is None else "running"
        if self.code in STOPPED or (self.code is None and (self.pid is None or self.stopping)):
            return "stopped"
        return "killed" if self.code is None else "failed" if self.code else "finished"

    @property
    def line(self) -> str:
        """The command line, with the GPUs that it was given."""
        line = shell_line(["gerl", self.command, *self.arguments])
        return f"{VISIBLE}={','.join(self.devices)} {line}" if self.devices not in ([], ["cpu"]) else line


@dataclass
class Note:
    """What a user wrote about a run."""

    note: str
    star: bool


@dataclass
class SavedDraft:
    """What the store needs of a draft; `read_draft` checks the rest."""

    revision: int = 0


@dataclass
class Content:
    """Types of `studio.json`; other keys are kept."""

    jobs: list[Job] = field(default_factory=list)
    drafts: dict[str, SavedDraft] = field(default_factory=dict)
    notes: dict[str, Note] = field(default_factory=dict)


class Store:
    """State of the studio: a small JSON file, rewritten at each change and locked by the server that uses it.

    The file lists commands to start, so an HMAC with the user's key binds it to this user and this folder.
    """

    def __init__(self, root: Path, trust: bool = False) -> None:
        """Open the file in `root`.

        Raises `GerlError` if another studio uses it, or if it cannot be read or written, and `TrustError` if another
        user wrote it or it was written in another folder, unless `trust`.
        """
        self.root, self.path, self.lock = root, root / FILE, threading.RLock()
        try:
            root.mkdir(parents=True, exist_ok=True)
            self._held = (root / f".{FILE}.lock").open("a+")
        except OSError as error:
            raise ConfigError(f"folder={root}: it cannot be written ({reason(error)}); choose another") from None
        try:
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._held.seek(0)
            where = self._held.read().strip()
            raise GerlError(f"{root} is open in another studio{f', {where}' if where else ''}: use that page") from None
        try:
            text = regular(self.path, LARGEST_JSON).read_bytes()
            TypeAdapter(Content).validate_json(text, strict=True)
            self.values: dict[str, Any] = load_json(text)
        except FileNotFoundError:
            self.values = {}
        except ValidationError as error:
            (first, *_), place = error.errors(), "".join(f"{part}: " for part in error.errors()[0]["loc"])
            raise damaged(self.path, f"{place}{first['msg']}") from None
        except (OSError, ValueError) as error:
            raise damaged(self.path, reason(error)) from None
        signature = self.values.pop(SIGNATURE, None)
        if self.values and signature != self._signature():
            if not trust:
                self.close()
                raise TrustError(
                    f"{self.path} was not written by you in this folder, and the studio would start its commands and "
                    "import the code of its drafts: read it, then add trust=true, or move it away"
                )
            with self.changing():
                logger.warning("%s is trusted from now on", self.path)

    def _signature(self) -> str:
        content = json.dumps([str(self.root.resolve()), self.values])
        return hmac.new(user_key(), content.encode(), hashlib.sha256).hexdigest()

    def write_address(self, address: str) -> None:
        """Write the address of the page into the lock file, for the message to a second server."""
        self._held.seek(0)
        self._held.truncate()
        self._held.write(address)
        self._held.flush()

    @contextlib.contextmanager
    def changing(self) -> Iterator[dict[str, Any]]:
        """Change the values within the block, and write them at its end."""
        with self.lock:
            yield self.values
            write_file(self.path, json.dumps({**self.values, SIGNATURE: self._signature()}, indent=1), private=True)

    def close(self) -> None:
        self._held.close()


@cache
def user_key() -> bytes:
    """Return the key with which this user's files are signed; created on first use in `$XDG_STATE_HOME/gerl`."""
    path = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "gerl" / "studio.key"
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_file(part, secrets.token_bytes(KEY), private=True)
            with contextlib.suppress(FileExistsError):  # another studio has just created it
                os.link(part, path)
            part.unlink()
        key = path.read_bytes()
        if len(key) != KEY:
            raise GerlError(f"it has {len(key)} bytes, not {KEY}; remove it")
        return key
    except (GerlError, OSError) as error:
        logger.warning(
            "%s cannot be used (%s): the studio will ask for trust=true at its next start; remove the file, or set "
            "XDG_STATE_HOME to a folder that you can write",
            *(path, reason(error)),
        )
        return secrets.token_bytes(KEY)


def damaged(path: Path, why: str) -> GerlError:
    """Return the error for a state that cannot be read."""
    return GerlError(f"{path} cannot be read ({why}): repair it, or move it away")


class Jobs:
    """Starts the waiting jobs of a store in their order, and follows the running ones."""

    def __init__(
        self,
        store: Store,
        changed: Callable[[], None] = lambda: None,
        program: Sequence[str] = (sys.executable, "-m", "gerl"),
    ) -> None:
        """`changed`: called after each change. `program`: before the command of a job."""
        self.store, self.changed, self.program = store, changed, program
        names = {f.name for f in fields(Job)}
        self.all = [Job(**{k: v for k, v in row.items() if k in names}) for row in store.values.get("jobs", [])]
        numbers = [str(number) for number in range(len(hardware()["gpus"]))]
        visible = os.environ.get(VISIBLE)  # of the server
        self.devices = (numbers if visible is None else visible.split(",") if numbers and visible else []) or ["cpu"]
        self._written = [job.state for job in self.all]  # states in the file
        self.environment: dict[str, str] = {}  # of services, for what must not be in a command line
        self._children: dict[int, subprocess.Popen[bytes]] = {}

    def add(self, command: str, arguments: Sequence[str], title: str, gpus: int = 1, run: str | None = None) -> Job:
        """Add a job at the end of the queue; `{out}` in an argument is its folder."""
        with self.store.lock:
            number = max((job.id for job in self.all), default=0) + 1
            while (self.store.root / FOLDER / str(number)).exists():  # of a state that was moved away
                number += 1
            job = Job(number, command, [], title, now(), gpus, run=run)
            job.arguments += [argument.replace("{out}", str(self.folder(job))) for argument in arguments]
            self.all.append(job)
            try:
                self._write()
            except BaseException:
                self.all.remove(job)  # what the user is told not to be in the queue must not run
                raise
        with contextlib.suppress(GerlError, OSError):  # it is in the queue; `watch` says what prevents its start
            self.poll()
        return job

    def get(self, number: int) -> Job:
        """Return a job; raises `GerlError` if there is none with this number."""
        for job in self.all:
            if job.id == number:
                return job
        raise GerlError(f"there is no job {number}")

    def folder(self, job: Job) -> Path:
        """Return the folder of the log and the results of a job."""
        return self.store.root / FOLDER / str(job.id)

    def log(self, job: Job) -> str:
        """Return the last `TAIL` bytes of the log of a job."""
        with contextlib.suppress(OSError), regular(self.folder(job) / LOG).open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
            return file.read().decode("utf-8", "replace")
        return ""

    def stop(self, job: Job) -> None:
        """Cancel a waiting job, or send SIGINT to a running one, as Ctrl-C does; a second one ends it at once."""
        with self.store.lock:
            if job.state == "waiting":
                job.ended = now()
                self._write()
            elif job.state == "running" and job.pid is not None and is_alive(job.pid, job.clock):
                os.killpg(job.pid, signal.SIGINT)
                job.stopping = True
                self._write()

    def move(self, job: Job, places: int) -> None:
        """Move a waiting job by `places` in the queue."""
        with self.store.lock:
            waiting = [other for other in self.all if other.state == "waiting"]
            if job not in waiting:
                return
            target = waiting[min(max(0, waiting.index(job) + places), len(waiting) - 1)]
            place = self.all.index(target)
            self.all.remove(job)
            self.all.insert(place, job)
            self._write()

    def poll(self) -> None:
        """Update the states of running jobs, and start waiting ones on free devices."""
        with self.store.lock:
            for job in self.all:
                if job.state == "running":
                    self._follow(job)
            busy = {device for job in self.all if job.state == "running" for device in job.devices}
            free = [device for device in self.devices if device not in busy]
            waiting = [job for job in self.all if job.state == "waiting"]
            for job in sorted(waiting, key=lambda job: job.gpus > 0):
                needed = min(job.gpus, len(self.devices))
                if needed > len(free):
                    break  # the first of the queue is not overtaken
                self._record_start(job, free[:needed])
                try:
                    self._start(job)
                    free = free[needed:]
                except (OSError, ValueError) as error:
                    job.ended, job.code = now(), 1
                    logger.error("job %d cannot be started: %s", job.id, reason(error))
            if self._written != [job.state for job in self.all]:
                self._write()

    def _record_start(self, job: Job, devices: Sequence[str]) -> None:
        """Record the start before the process exists; a record that cannot be written leaves the job waiting."""
        job.devices, job.started = list(devices), now()
        try:
            self._write()
        except BaseException:
            job.devices, job.started = [], None
            raise

    def _start(self, job: Job) -> None:
        folder, devices = self.folder(job), job.devices
        folder.mkdir(parents=True, exist_ok=True)
        command = [*self.program, job.command, *job.arguments]
        shown = os.environ | (self.environment if job.command == "serve" else {})
        if devices and "cpu" not in devices:
            shown[VISIBLE] = ",".join(devices)
            for other in self.all:  # a model that is there to be tried needs the memory
                if other.command == "serve" and other.state == "running" and not other.stopping:
                    self.stop(other)
        child = subprocess.Popen(
            ["sh", "-c", SHELL, str(folder), *command], env=shown, stdin=subprocess.DEVNULL, start_new_session=True
        )
        self._children[job.id] = child
        job.pid, job.clock = child.pid, clock_of(child.pid)
        logger.info("%d: %s", job.id, redact(job.line))

    def _follow(self, job: Job) -> None:
        if (child := self._children.get(job.id)) is not None:
            child.poll()  # else a process that has ended stays in the table of processes
        assert job.pid is not None
        with contextlib.suppress(OSError, ValueError):
            pid, clock = map(int, read_text(self.folder(job) / PID).split())
            if pid != job.pid:  # a studio that was killed had started the job
                job.pid, job.clock, child = pid, clock, None
        if is_alive(job.pid, job.clock):
            return
        code = None if child is None or child.returncode is None or child.returncode < 0 else child.returncode
        with contextlib.suppress(OSError, ValueError):
            code = int(read_text(self.folder(job) / EXIT))
        job.ended, job.code = now(), code
        self._children.pop(job.id, None)
        logger.info("%d: %s", job.id, job.state)

    def _write(self) -> None:
        with self.store.changing() as values:
            values["jobs"] = [asdict(job) for job in self.all]
        self._written = [job.state for job in self.all]
        self.changed()

    def watch(self, stop: threading.Event) -> None:
        """Poll the jobs until `stop` is set; running ones continue."""
        logged = ""
        while not stop.wait(LOOK):
            try:
                self.poll()
                logged = ""
            except (GerlError, OSError, ValueError) as error:  # a full disk, for example; the next poll tries again
                if logged != (logged := str(error)):
                    logger.error("%s", error)


def clock_of(pid: int) -> int | None:
    """Return when a process started, in clock ticks since the machine did; None if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *rest = stat.rpartition(")")[2].split()  # the name before may have spaces
    return None if state in "ZX" else int(rest[18])


def shell_line(words: Sequence[str]) -> str:
    """Return a line for a shell: as `shlex.join`, but with double quotes around single ones where these suffice."""
    plain = re.compile(r"""[^"$`\\!]*'[^"$`\\!]*""")
    return " ".join(f'"{word}"' if plain.fullmatch(word) else shlex.quote(word) for word in words)


def is_alive(pid: int, clock: int | None) -> bool:
    """Whether process `pid` runs and is the one that started at `clock`."""
    return clock is not None and clock_of(pid) == clock


def as_rows(jobs: Jobs) -> list[Mapping[str, Any]]:
    """Return the jobs for the page: waiting ones in the order of the queue, then the others, newest first."""
    rows = [{**asdict(job), "state": job.state, "line": job.line} for job in jobs.all]
    waiting = [row for row in rows if row["state"] == "waiting"]
    return [*waiting, *reversed([row for row in rows if row["state"] != "waiting"])]
