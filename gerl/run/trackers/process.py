"""Trackers: their protocol, the process each runs in, and the record of their run ids."""

import contextlib
import json
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import requests

from gerl.config.bounded_text import read_json
from gerl.errors import GerlError
from gerl.progress import waiting
from gerl.run.card import redact
from gerl.utils.files import reason, write_file

PROJECT = "gerl"  # default if neither logger.project nor the tracker's own settings name one
REACHED = 5.0  # seconds for a server to answer


@dataclass(frozen=True)
class TrackedRun:
    """Description of a run for trackers."""

    folder: Path
    name: str
    project: str | None = None
    tags: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)  # nested values without secrets
    text: str = ""  # of config.yaml
    start_step: int = 0  # that a resumed run continues from
    id: str | None = None  # the tracker's, of the run to resume


class Logger(Protocol):
    """Methods that sinks and trackers share.

    `log`: the metrics of a step, all finite. `image`: an image file of the run folder, under a name such as
    `samples/train`. `alert`: a warning about the run.
    """

    def log(self, step: int, metrics: dict[str, float]) -> None: ...
    def image(self, step: int, name: str, path: Path) -> None: ...
    def alert(self, step: int, sentence: str) -> None: ...


class Sink(Logger, Protocol):
    """Receiver of metrics, images and LoRAs in addition to `metrics.jsonl`.

    `lora`: the LoRA of a checkpoint, its files by name. `close`: flush and end, as failed or finished; may be called
    twice.
    """

    def lora(self, step: int, files: dict[str, bytes]) -> None: ...
    def close(self, failed: bool = False) -> None: ...


class Remote(Logger, Protocol):
    """A tracker of another package, in its own process, where it may raise.

    It imports the package when it is made, and starts a run or resumes the one with `run.id`; `project`, `name` and
    `id` identify the tracker's run, `place` says where to find it. `lora`: of a checkpoint, in a folder that is removed
    afterwards. `close`: flush and end the tracker's run.
    """

    project: str
    name: str
    id: str
    place: str

    def __init__(self, run: TrackedRun) -> None: ...
    def lora(self, step: int, folder: Path) -> None: ...
    def close(self, failed: bool) -> None: ...


def reach(url: str, otherwise: str) -> None:
    """Raise `GerlError` with a remedy if nothing answers at `url`: the packages themselves retry for minutes."""
    try:
        requests.head(url, timeout=REACHED)
    except requests.Timeout:
        raise GerlError(f"{redact(url)} did not answer within {REACHED:.0f} s ({otherwise})") from None
    except requests.RequestException as error:
        raise GerlError(f"{redact(url)} cannot be reached ({otherwise})") from error


# --- A tracker in its own process, for which a run waits only at its end, and not forever.
#
# Requests are lines of JSON, each followed by the files it names; replies are lines of JSON.

logger = logging.getLogger(__name__)
SILENCE = 180.0  # seconds a call may take
CLOSING, OPENING = 30.0, 60.0  # seconds without progress to wait for its end; before its first reply
CALLS, BYTES = 2000, 2**30  # that may be pending
MODULE = "gerl.run.trackers.child"


class TrackerProcess:
    """Forwards the calls of a `Sink` to the tracker `name`; if it fails, it is disabled with a warning.

    opened: called in another thread with the tracker's run (`project`, `name`, `id`, `place`).
    """

    def __init__(self, name: str, run: TrackedRun, opened: Callable[[dict[str, str]], None]) -> None:
        self.name, self._opened = name, opened
        self.log_file = run.folder / "trackers" / f"{name}.log"
        self._queue: queue.SimpleQueue[tuple[bytes, ...] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._ended = self._closing = False
        self._sent = self._taken = self._bytes = 0
        self._moved = time.monotonic()  # time of the last sign of life
        self._threads: list[threading.Thread] = []
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._process = self._start()
        except OSError as error:
            self._leave(f"its process failed to start: {reason(error)}")
            return
        self._threads = [
            threading.Thread(target=work, args=(self._process,), name=f"{name}: {work.__name__}", daemon=True)
            for work in (self._write, self._read)
        ]
        for thread in self._threads:
            thread.start()
        self._send("open", run={**asdict(run), "folder": str(run.folder.resolve())})

    def _start(self) -> subprocess.Popen[bytes]:
        # it finds the same packages, and its output goes to a file; in a process group of its own it outlives a Ctrl-C,
        # after which the run still logs
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        with self.log_file.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", MODULE, self.name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,
            )

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._send("log", step=step, metrics=metrics)

    def image(self, step: int, name: str, path: Path) -> None:
        self._send("image", step=step, name=name, path=str(path.resolve()))

    def lora(self, step: int, files: dict[str, bytes]) -> None:
        self._send("lora", files, step=step)

    def alert(self, step: int, sentence: str) -> None:
        self._send("alert", step=step, sentence=sentence)

    def close(self, failed: bool = False) -> None:
        if self._ended or self._closing:
            return
        self._send("close", failed=failed)
        self._closing, self._moved = True, time.monotonic()
        self._queue.put(None)
        with waiting(f"sending the rest to {self.name}"):
            while self._threads[1].is_alive():
                self._threads[1].join(0.05)
                limit = CLOSING if self._taken else OPENING  # creating a database on a slow disk takes time
                if time.monotonic() - self._moved > limit:
                    self._leave(f"it did not accept the rest within {limit:.0f} s")

    def _send(self, call: str, files: Mapping[str, bytes] | None = None, **arguments: Any) -> None:
        if self._ended or self._closing:
            return
        files = files or {}
        sizes = {name: len(content) for name, content in files.items()}
        header = json.dumps({"call": call, **arguments, "files": sizes}, default=str).encode() + b"\n"
        with self._lock:
            if self._sent == self._taken:
                self._moved = time.monotonic()
            self._sent, self._bytes = self._sent + 1, self._bytes + sum(sizes.values())
            waiting_calls, waiting_bytes, silent = self._sent - self._taken, self._bytes, time.monotonic() - self._moved
        if silent > SILENCE:
            self._leave(f"it has not responded for {silent:.0f} s")
        elif waiting_calls > CALLS or waiting_bytes > BYTES:
            self._leave(f"it is slower than the run: {waiting_calls} calls are pending")
        else:
            self._queue.put((header, *files.values()))

    def _write(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # the process has ended, which `_read` notices
            while (parts := self._queue.get()) is not None:
                for part in parts:
                    process.stdin.write(part)
                process.stdin.flush()
                with self._lock:
                    self._bytes -= sum(map(len, parts[1:]))
        with contextlib.suppress(OSError):
            process.stdin.close()

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with self._lock:
                self._moved = time.monotonic()
            reply = json.loads(line)
            if "opened" in reply:
                self._opened(reply["opened"])
            if "failed" in reply:
                self._leave(reply["failed"])
            with self._lock:
                self._taken += 1
                self._ended = self._ended or "closed" in reply
            if "closed" in reply:
                _end(process)
        self._leave("its process has ended")  # unless it was closed, or left before

    def _leave(self, why: str) -> None:
        with self._lock:
            ended, self._ended = self._ended, True
        if ended:
            return
        logger.warning("%s is disabled from here on: %s; see %s", self.name, why, self.log_file)
        if self._process is not None:
            _end(self._process)
            self._queue.put(None)


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# --- `trackers.json` of the run folder: the trackers' run ids, for a resumed run

KEYS = ("project", "name", "id")


class Record:
    """The file, read on construction and written whenever a tracker starts a run."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        try:
            stored = read_json(path)
        except FileNotFoundError:
            stored = {}
        except (OSError, ValueError) as error:
            logger.warning("%s cannot be read (%s): trackers start new runs", path, error)
            stored = {}
        entries = stored.items() if isinstance(stored, dict) else ()
        self._runs = {
            name: {key: str(entry[key]) for key in KEYS}
            for name, entry in entries
            if isinstance(entry, dict) and all(entry.get(key) for key in KEYS)
        }

    def for_resume(self, tracker: str, run: TrackedRun) -> TrackedRun:
        """Return the run with the recorded project, name and id of `tracker`; unchanged without a record."""
        record = self._runs.get(tracker)
        return replace(run, project=record["project"], name=record["name"], id=record["id"]) if record else run

    def keeper(self, tracker: str) -> Callable[[dict[str, str]], None]:
        """Return a thread-safe function that records and logs the tracker's run."""

        def keep(opened: dict[str, str]) -> None:
            logger.info("%s: run %s of project %s; %s", tracker, opened["name"], opened["project"], opened["place"])
            entry = {key: opened[key] for key in KEYS}
            with self._lock:
                if self._runs.get(tracker) == entry:
                    return
                self._runs[tracker] = entry
                try:
                    write_file(self._path, json.dumps(self._runs, indent=1) + "\n")
                except GerlError as error:
                    logger.warning("%s; when resumed, the run starts another one in %s", error, tracker)

        return keep
