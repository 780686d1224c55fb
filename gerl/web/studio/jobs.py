"""Jobs of the studio: commands of gerl, each a process of its own that outlives the page, one after the other per GPU.

All that is known of a job is in `studio.json`, and its log and exit code are in its folder, so a page that was killed
continues with the same jobs.
"""

import contextlib
import fcntl
import json
import logging
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from gerl.errors import GerlError
from gerl.run.card import hardware, now
from gerl.utils.files import write_file

logger = logging.getLogger("gerl")
State = Literal["waiting", "running", "finished", "failed", "stopped", "lost"]
FILE, FOLDER = "studio.json", "studio"  # in the folder of the runs
LOG, EXIT = "log.txt", "exit"  # in the folder of a job
LOOK = 0.3  # seconds between looks at the processes
STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
TAIL = 20_000  # bytes of a log that are read
# The exit code outlives the page, and no pipe or terminal of the page is held. The command handles the signals, for
# which the shell waits.
SHELL = 'exec > "$0/log.txt" 2>&1; trap : INT TERM; "$@"; echo $? > "$0/exit.part"; mv "$0/exit.part" "$0/exit"'


@dataclass
class Job:
    """A command with its process: `gerl COMMAND ARGUMENTS`."""

    id: int
    command: str  # train, evaluate, score, ...
    arguments: list[str]
    title: str
    created: str
    gpus: int = 1  # that it needs, if there are any; 0: it does not wait for others
    devices: list[str] = field(default_factory=list)  # that it has
    pid: int | None = None
    clock: int | None = None  # start of the process in clock ticks since the machine started
    started: str | None = None
    ended: str | None = None
    code: int | None = None  # None at its end: the process was killed
    run: str | None = None  # folder of the run that it trains, below that of all runs

    @property
    def state(self) -> State:
        if self.ended is None:
            return "waiting" if self.pid is None else "running"
        if self.pid is None or self.code in STOPPED:
            return "stopped"
        return "lost" if self.code is None else "failed" if self.code else "finished"

    @property
    def line(self) -> str:
        """The command line."""
        return shlex.join(["gerl", self.command, *self.arguments])


class Store:
    """What the studio keeps: a small JSON file, written at every change; only one studio has it open."""

    def __init__(self, root: Path) -> None:
        """Open the file in `root`. Raises `GerlError` if another studio has it, or it cannot be read."""
        self.root, self.path, self.lock = root, root / FILE, threading.RLock()
        root.mkdir(parents=True, exist_ok=True)
        self._held = (root / f".{FILE}.lock").open("a+")
        try:
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._held.seek(0)
            where = self._held.read().strip()
            raise GerlError(f"{root} is open in another studio{f', {where}' if where else ''}: use that page") from None
        try:
            self.values: dict[str, Any] = json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            self.values = {}
        except (OSError, ValueError) as error:
            raise GerlError(f"{self.path} cannot be read ({error}): repair it, or move it away") from None

    def opened_at(self, address: str) -> None:
        """Say in the lock where the page is."""
        self._held.seek(0)
        self._held.truncate()
        self._held.write(address)
        self._held.flush()

    @contextlib.contextmanager
    def changing(self) -> Iterator[dict[str, Any]]:
        """Change the values within the block, and write them at its end."""
        with self.lock:
            yield self.values
            write_file(self.path, json.dumps(self.values, indent=1))

    def close(self) -> None:
        self._held.close()


class Jobs:
    """The jobs of a store: starts those that wait, in their order, and notices the end of those that run."""

    def __init__(
        self,
        store: Store,
        changed: Callable[[], None] = lambda: None,
        program: Sequence[str] = (sys.executable, "-m", "gerl"),
    ) -> None:
        """`changed`: called after each change. `program`: before the command of a job."""
        self.store, self.changed, self.program = store, changed, program
        known = {f.name for f in fields(Job)}
        self.all = [Job(**{k: v for k, v in row.items() if k in known}) for row in store.values.get("jobs", [])]
        gpus = hardware()["gpus"]
        self.devices = [str(number) for number in range(len(gpus))] or ["cpu"]
        self._children: dict[int, subprocess.Popen[bytes]] = {}

    def add(self, command: str, arguments: Sequence[str], title: str, gpus: int = 1, run: str | None = None) -> Job:
        """Add a job at the end of the queue; `{out}` in an argument is its folder."""
        with self.store.lock:
            job = Job(max((job.id for job in self.all), default=0) + 1, command, [], title, now(), gpus, run=run)
            job.arguments += [argument.replace("{out}", str(self.folder(job))) for argument in arguments]
            self.all.append(job)
            self._write()
        self.look()
        return job

    def get(self, number: int) -> Job:
        """Return a job; raises `GerlError` if there is none with this number."""
        for job in self.all:
            if job.id == number:
                return job
        raise GerlError(f"there is no job {number}")

    def folder(self, job: Job) -> Path:
        """Return the folder of its log and results."""
        return self.store.root / FOLDER / str(job.id)

    def log(self, job: Job) -> str:
        """Return the end of the log."""
        with contextlib.suppress(FileNotFoundError), (self.folder(job) / LOG).open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
            return file.read().decode("utf-8", "replace")
        return ""

    def stop(self, job: Job) -> None:
        """Remove a waiting job from the queue, or interrupt one that runs, as Ctrl-C does."""
        with self.store.lock:
            if job.state == "waiting":
                job.ended = now()
                self._write()
            elif job.state == "running" and job.pid is not None and is_alive(job.pid, job.clock):
                os.killpg(job.pid, signal.SIGINT)

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

    def look(self) -> None:
        """Notice which processes have ended, and start those for which there is room."""
        with self.store.lock:
            before = [job.state for job in self.all]
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
                self._start(job, free[:needed])
                free = free[needed:]
            if before != [job.state for job in self.all]:
                self._write()

    def _start(self, job: Job, devices: Sequence[str]) -> None:
        folder = self.folder(job)
        folder.mkdir(parents=True, exist_ok=True)
        command = [*self.program, job.command, *job.arguments]
        shown = dict(os.environ)
        if devices and "cpu" not in devices:
            shown["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        child = subprocess.Popen(
            ["sh", "-c", SHELL, str(folder), *command], env=shown, stdin=subprocess.DEVNULL, start_new_session=True
        )
        self._children[job.id] = child
        job.pid, job.clock, job.devices, job.started = child.pid, clock_of(child.pid), list(devices), now()
        logger.info("%d: %s", job.id, job.line)

    def _follow(self, job: Job) -> None:
        if (child := self._children.get(job.id)) is not None:
            child.poll()  # else a process that has ended stays in the table of processes
        assert job.pid is not None
        if is_alive(job.pid, job.clock):
            return
        with contextlib.suppress(FileNotFoundError, ValueError):
            job.code = int((self.folder(job) / EXIT).read_text())
        job.ended = now()
        self._children.pop(job.id, None)
        logger.info("%d: %s", job.id, job.state)

    def _write(self) -> None:
        with self.store.changing() as values:
            values["jobs"] = [asdict(job) for job in self.all]
        self.changed()

    def watch(self, stop: threading.Event) -> None:
        """Look after the jobs until `stop` is set; those that run then go on."""
        while not stop.wait(LOOK):
            self.look()


def clock_of(pid: int) -> int | None:
    """Return when a process started, in clock ticks since the machine did; None if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *rest = stat.rpartition(")")[2].split()  # the name before may have spaces
    return None if state in "ZX" else int(rest[18])


def is_alive(pid: int, clock: int | None) -> bool:
    """Whether process `pid` runs and is the one that started at `clock`."""
    return clock is not None and clock_of(pid) == clock


def as_rows(jobs: Jobs) -> list[Mapping[str, Any]]:
    """Return the jobs for the page, the newest first; those that wait in the order of the queue."""
    rows = [{**asdict(job), "state": job.state, "line": job.line} for job in jobs.all]
    waiting = [row for row in rows if row["state"] == "waiting"]
    return [*waiting, *reversed([row for row in rows if row["state"] != "waiting"])]
