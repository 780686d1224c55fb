"""Ends a training run in order when the vote service that started it is gone without having done so.

A program of its own, which waits until its standard input ends: `python reaper.py PID`. A byte there means that the run
has ended. It uses nothing but the standard library, to start quickly.
"""

import contextlib
import os
import signal
import sys

if __name__ == "__main__":
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    if not sys.stdin.buffer.read():
        with contextlib.suppress(OSError):
            os.kill(int(sys.argv[1]), signal.SIGTERM)
