"""Kills the processes of an embedded Ray, found by a mark in their environment.

Also a program that waits until its standard input closes because the command is gone, however it ended; some processes
of Ray would otherwise stay for a minute. It imports only the standard library, to start quickly.
"""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

MARK = "GERL_RAY"  # environment variable that marks the processes of an embedded Ray
GONE = 10.0  # seconds to wait until killed processes are gone


def kill(mark: str) -> None:
    """Kill all processes that were started with this `mark`, and wait until they are gone."""
    deadline = time.monotonic() + GONE
    while (alive := processes(mark)) and time.monotonic() < deadline:
        for process in alive:
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.02)


def processes(mark: str) -> list[int]:
    """Return the live processes started with this `mark`, except this one; empty without /proc."""
    wanted, numbers = f"{MARK}={mark}\0".encode(), list[int]()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            if wanted in (folder / "environ").read_bytes() and int(folder.name) != os.getpid():
                numbers.append(int(folder.name))
    return numbers


if __name__ == "__main__":
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    sys.stdin.read()
    kill(sys.argv[1])
