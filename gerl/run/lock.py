"""The lock of a run folder: two runs never write into the same one."""

import contextlib
import fcntl
import json
import logging
import os
import socket
import time
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

from gerl.errors import ConfigError
from gerl.utils.files import reason

log = logging.getLogger(__name__)

NAME = "run.lock"
ATTEMPTS, PAUSE = 10, 0.02  # a look by `holder` holds the lock for an instant


class RunLock:
    """The right to write into a run folder, from `acquire` to `release` or the end of the process, however it ends.

    It is the lock of the operating system on the file `run.lock`; what is written in the file is for messages only.
    Processes that this one starts do not inherit it: Python's files close on exec.
    """

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / NAME
        self._file: BinaryIO | None = None

    def acquire(self) -> None:
        """Take the lock of a folder that exists.

        Raises:
            ConfigError: another process has it; the sentence names host, process and since when.
            OSError: the folder cannot be written.
        """
        for _ in range(ATTEMPTS):
            file = self.path.open("ab")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
                time.sleep(PAUSE)
                continue
            except OSError as error:  # some network file systems have no locks
                log.warning(
                    "%s cannot be locked (%s): do not start a second run in it", self.path.parent, reason(error)
                )
            # whoever had the lock before may have removed the file that was opened here
            if self._is_at_path(file):
                file.truncate(0)
                file.write(json.dumps(_this_process()).encode())
                file.flush()
                self._file = file
                return
            file.close()
        raise ConfigError(
            f"{self.path.parent}: its run is still alive ({_said(self.path)}); wait for its end or stop it, or "
            "start another run with its own hydra.run.dir and checkpoint.resume=never"
        )

    def release(self) -> None:
        """Give the lock back and remove its file; without a lock this does nothing."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # a lock file that stays is harmless
                if self._is_at_path(self._file):
                    self.path.unlink()
            self._file.close()
            self._file = None

    def _is_at_path(self, file: BinaryIO) -> bool:
        try:
            return os.path.samestat(os.fstat(file.fileno()), self.path.stat())
        except FileNotFoundError:
            return False


def alive_since(run_dir: Path) -> int | None:
    """When the run that is alive in a folder started, in ns as of `st_mtime_ns`; None if none is."""
    try:
        with (run_dir / NAME).open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return os.fstat(file.fileno()).st_mtime_ns
    except OSError:
        pass
    return None


def _this_process() -> dict[str, object]:
    since = datetime.now().astimezone().isoformat(" ", timespec="seconds")
    return {"host": socket.gethostname(), "pid": os.getpid(), "since": since}


def _said(path: Path) -> str:
    """The holder of a lock, as it wrote into its file."""
    try:
        values = json.loads(path.read_bytes())
        return f"process {values['pid']} on {values['host']}, since {values['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
