"""A tracker in a process of its own: the run hands over what it writes and waits for nothing but the end, for a time.

To the process go lines of JSON, each followed by the files that it names; back come lines of JSON.
"""

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
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gerl.commandline.waiting import waiting
from gerl.run.trackers.base import TrackedRun
from gerl.utils.files import reason

logger = logging.getLogger(__name__)
SILENCE = 180.0  # seconds that a call may take
CLOSING, OPENING = 30.0, 60.0  # seconds without progress after which the end is not waited for; if it has not begun yet
CALLS, BYTES = 2000, 2**30  # that may wait to be taken
MODULE = "gerl.run.trackers.child"


class TrackerProcess:
    """Hands the calls of a `Sink` to the tracker `name`; one that fails costs a warning and is left out from then on.

    opened: called in another thread with what the tracker says of its run (`project`, `name`, `id`, `place`).
    """

    def __init__(self, name: str, run: TrackedRun, opened: Callable[[dict[str, str]], None]) -> None:
        self.name, self._opened = name, opened
        self.log_file = run.folder / "trackers" / f"{name}.log"
        self._queue: queue.SimpleQueue[tuple[bytes, ...] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._ended = self._closing = False
        self._sent = self._taken = self._bytes = 0
        self._moved = time.monotonic()  # when the process last showed that it goes on
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
        # It finds the packages that this process finds, and what it prints goes to a file. It is no part of the
        # terminal's process group: it has to outlive a Ctrl-C, after which the run still writes.
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
                limit = CLOSING if self._taken else OPENING  # to make a database takes a slow disk its time
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
        with contextlib.suppress(OSError):  # the process has ended, of which `_read` hears
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
        closed = False
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
                closed = closed or "closed" in reply
                self._ended = self._ended or closed
        if closed:
            _end(process)
        else:
            self._leave("its process has ended")

    def _leave(self, why: str) -> None:
        """Go on without the tracker."""
        with self._lock:
            ended, self._ended = self._ended, True
        if ended:
            return
        logger.warning("%s is disabled from here on: %s; see %s", self.name, why, self.log_file)
        if self._process is not None:
            _end(self._process)
            self._queue.put(None)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and what it started: it is done, or not waited for any more."""
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
