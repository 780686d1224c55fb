"""The training run that people vote for, as a process of the same terminal."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence

from gerl.commandline import signals
from gerl.errors import Interrupted, TrainingError
from gerl.vote import reaper

logger = logging.getLogger("gerl")
TOKEN = "GERL_VOTE_TOKEN"  # the environment variable from which the scorer has the token
LOOK = 0.2  # seconds


def train(arguments: Sequence[str], token: str | None, ended: Callable[[str], None], server: threading.Thread) -> None:
    """Run `gerl train` with `arguments` to its end; `ended` is told how that was, in words for voters.

    A signal that ends this command ends the run as well, in order, before `Interrupted` goes on. Raises `TrainingError`
    if the run fails, or the `server` ends before it.
    """
    environment = dict(os.environ) | ({TOKEN: token} if token is not None else {})
    command = [sys.executable, "-m", "gerl.trainer.main_flowgrpo", *arguments]
    process = subprocess.Popen(command, env=environment)
    with _guarded(process), signals.before_leaving(process.kill):
        try:
            while process.poll() is None:
                if not server.is_alive():
                    process.send_signal(signal.SIGTERM)
                    process.wait()
                    raise TrainingError("the vote service stopped, and the run with it: see its log")
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(LOOK)
        except KeyboardInterrupt as error:
            ended("The run was stopped.")
            number = error.signal_number if isinstance(error, Interrupted) else signal.SIGINT
            if process.poll() is None:
                process.send_signal(number)  # a terminal sends it to both: within a second it is the same one
            process.wait()
            raise
    if process.returncode == 0:
        ended("The run is finished. Thank you.")
        return
    ended("The run was stopped." if process.returncode > 128 else "The run ended with an error.")
    how = f"by {signals.name(-process.returncode)}" if process.returncode < 0 else f"with {process.returncode}"
    raise TrainingError(f"the run ended {how}: see its output above; the votes are kept")


@contextlib.contextmanager
def _guarded(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    """While the context lasts, the end of this process, by a kill -9 for example, ends `process` in order."""
    watching = subprocess.Popen(
        [sys.executable, "-I", "-S", reaper.__file__, str(process.pid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        if process.poll() is None:
            process.terminate()
        watching.communicate(b"!")
