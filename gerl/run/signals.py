"""SIGINT and SIGTERM as an exception that never arrives in the middle of an update or a save."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from gerl.errors import Interrupted


class Signals:
    """While entered, SIGINT and SIGTERM raise `Interrupted` in the main thread, or after the current `deferred` block.

    Outside the main thread Python has no signal handlers, and this does nothing.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._deferred = 0
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "Signals":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        first, self.received = self.received is None, number
        if first and not self._deferred:
            raise Interrupted(number)
        if not first and number == signal.SIGINT:
            raise KeyboardInterrupt  # a second Ctrl-C does not wait

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """A block that a first signal does not interrupt; `Interrupted` is raised when it ends."""
        self._deferred += 1
        try:
            yield
        finally:
            self._deferred -= 1
        self.check()

    def check(self) -> None:
        """Raise `Interrupted` if a signal has arrived outside any deferred block."""
        if self.received is not None and not self._deferred:
            raise Interrupted(self.received)
