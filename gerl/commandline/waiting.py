"""Lines in the log that say what a command waits for, where that takes more than a moment."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator

logger = logging.getLogger("gerl")
MOMENT = 2.0  # seconds without a word
REMINDER = 60.0  # seconds between the lines of a long wait


@contextlib.contextmanager
def waiting(
    what: str, so_far: Callable[[], str] | None = None, after: float = MOMENT, every: float = REMINDER
) -> Iterator[None]:
    """Log `what` if the block takes more than `after` seconds, and the time that has passed `every` so many after that.

    `so_far`: words on the progress for the lines after the first, "" for none; called in another thread.
    """
    over, start = threading.Event(), time.perf_counter()

    def speak() -> None:
        if over.wait(after):
            return
        logger.info("%s ...", what)
        while not over.wait(every):
            progress = so_far() if so_far is not None else ""
            passed = duration(time.perf_counter() - start)
            logger.info("%s: %s so far%s", what, passed, f", {progress}" if progress else "")

    speaker = threading.Thread(target=speak, name=f"waiting: {what}", daemon=True)
    speaker.start()
    try:
        yield
    finally:
        over.set()
        speaker.join(timeout=1)  # its line belongs before those of what follows


def duration(seconds: float) -> str:
    """Seconds as `45 s`, `12 min` or `3 h 5 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
