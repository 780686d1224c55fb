"""Process of a tracker, started by `TrackerProcess`: executes the calls that it reads until it is closed.

If the run dies first, the tracker's run is closed as failed.
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

SHOWN = 300  # characters of an error of the package


def main(name: str) -> None:
    """Serve the tracker `name`; ends the process with all threads of the package."""
    for number in signals.NUMBERS:  # signals for the run, which closes this process
        signal.signal(number, signal.SIG_IGN)
    calls, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # a package that prompts gets no answer
    os.dup2(2, 1)  # all output goes to the log

    def reply(**words: Any) -> None:
        with contextlib.suppress(OSError):  # the run is gone
            replies.write(json.dumps(words) + "\n")
            replies.flush()

    try:
        serve(name, calls, reply)
    except BaseException as error:  # noqa: BLE001 - anything the package raises, SystemExit too
        traceback.print_exc()
        text = reason(error) if isinstance(error, Exception) else str(error)
        words = str(error) if isinstance(error, GerlError) else f"{type(error).__name__}: {text}"
        reply(failed=redact(words)[:SHOWN])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # exit handlers of a package may take forever


def serve(name: str, calls: BinaryIO, reply: Any) -> None:
    """Execute the calls; raises what the tracker raises."""
    tracker: Remote | None = None
    while line := calls.readline():
        header = json.loads(line)
        files = {name: calls.read(size) for name, size in header.pop("files").items()}
        call = header.pop("call")
        if tracker is None:
            fields = header["run"]
            tracker = REMOTE[name](TrackedRun(**{**fields, "folder": Path(fields["folder"])}))
            reply(opened={key: str(getattr(tracker, key)) for key in ("project", "name", "id", "place")})
            continue
        with tempfile.TemporaryDirectory() as folder:
            for file, content in files.items():
                (Path(folder) / file).write_bytes(content)
            match call:
                case "image":
                    tracker.image(header["step"], header["name"], Path(header["path"]))
                case "lora":
                    tracker.lora(header["step"], Path(folder))
                case _:
                    getattr(tracker, call)(**header)
        if call == "close":
            reply(closed=True)
            return
        reply(done=call)
    if tracker is not None:  # the run is gone
        last = threading.Timer(CLOSING, lambda: os.killpg(0, signal.SIGKILL))
        last.daemon = True
        last.start()
        tracker.close(failed=True)


if __name__ == "__main__":
    main(sys.argv[1])
