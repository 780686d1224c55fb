"""The process of a tracker, started by `TrackerProcess`: does call by call what it reads, until it is told to close.

If the run dies before it says so, the tracker's run is closed as failed.
"""

import contextlib
import json
import os
import signal
import sys
import tempfile
import threading
import traceback
from pathlib import Path
from typing import Any, BinaryIO

from gerl.commandline import signals
from gerl.errors import GerlError
from gerl.run.card import redact
from gerl.run.trackers import REMOTE
from gerl.run.trackers.process import CLOSING, Remote, TrackedRun
from gerl.utils.files import reason

SHOWN = 300  # characters of somebody else's error


def main(name: str) -> None:
    """Serve the tracker `name`; ends the process, with whatever the package has left running."""
    for number in signals.NUMBERS:  # of the run, which ends this process in its own time
        signal.signal(number, signal.SIG_IGN)
    calls, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # a package that asks something gets no answer
    os.dup2(2, 1)  # what it prints goes to the log, as all it says

    def reply(**words: Any) -> None:
        with contextlib.suppress(OSError):  # nobody listens any more
            replies.write(json.dumps(words) + "\n")
            replies.flush()

    try:
        serve(name, calls, reply)
    except BaseException as error:  # noqa: BLE001 - whatever the package raises, SystemExit too
        traceback.print_exc()
        words = str(error) if isinstance(error, GerlError) else f"{type(error).__name__}: {reason_of(error)}"
        reply(failed=redact(words)[:SHOWN])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # what a package does at exit may take for ever


def serve(name: str, calls: BinaryIO, reply: Any) -> None:
    """Do the calls; raises what the tracker raises."""
    tracker: Remote | None = None
    while line := calls.readline():
        header = json.loads(line)
        files = {name: calls.read(size) for name, size in header.pop("files").items()}
        call = header.pop("call")
        if tracker is None:
            given = header["run"]
            tracker = REMOTE[name](TrackedRun(**{**given, "folder": Path(given["folder"])}))
            reply(opened={key: str(getattr(tracker, key)) for key in ("project", "name", "id", "place")})
            continue
        match call:
            case "image":
                tracker.image(header["step"], header["name"], Path(header["path"]))
            case "lora":
                with tempfile.TemporaryDirectory() as folder:
                    for name_, content in files.items():
                        (Path(folder) / name_).write_bytes(content)
                    tracker.lora(header["step"], Path(folder))
            case "close":
                tracker.close(header["failed"])
                reply(closed=True)
                return
            case _:
                getattr(tracker, call)(**header)
        reply(done=call)
    if tracker is not None:  # the run is gone
        last = threading.Timer(CLOSING, lambda: os.killpg(0, signal.SIGKILL))
        last.daemon = True
        last.start()
        tracker.close(failed=True)


def reason_of(error: BaseException) -> str:
    """The error's own words on one line."""
    return reason(error) if isinstance(error, Exception) else str(error)


if __name__ == "__main__":
    main(sys.argv[1])
