"""Progress of a command: a bar on a terminal, elsewhere lines in the log; lines about what it waits for."""

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

logger = logging.getLogger("gerl")
EVERY = 30.0  # seconds between two lines, at least
MOMENT = 2.0  # seconds before the first line
REMINDER = 60.0  # seconds between the lines of a long wait


@contextlib.contextmanager
def waiting(
    what: str, so_far: Callable[[], str] | None = None, after: float = MOMENT, every: float = REMINDER
) -> Iterator[None]:
    """Log `what` if the block takes more than `after` seconds, then the elapsed time `every` so many seconds.

    `so_far`: describes the progress for later lines, "" for none; called in another thread.
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
        speaker.join(timeout=1)  # its line belongs before the lines of the next operation


def duration(seconds: float) -> str:
    """Format seconds as `45 s`, `12 min` or `3 h 5 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


class Progress:
    """Progress through `total` units of work: count, named values, time per unit, time left.

    Log records are written above the bar. disable: show nothing. what: name of a part of the work, shown only by a bar,
    which disappears when it is closed.
    """

    def __init__(
        self,
        total: int,
        initial: int = 0,
        disable: bool = False,
        unit: str = "step",
        what: str = "",
        leave: bool = True,
    ) -> None:
        """`leave`: keep the bar when all is done."""
        self.total, self.done, self.unit = total, initial, unit
        self._stack, self._bar = contextlib.ExitStack(), None
        terminal = sys.stderr.isatty()
        self._lines = not (disable or terminal or what)
        self._logged, self._logged_at, self._next = initial, time.perf_counter(), 0.0  # last line, time of the next
        if terminal and not disable:
            from tqdm import tqdm
            from tqdm.contrib.logging import logging_redirect_tqdm

            self._stack.enter_context(logging_redirect_tqdm())
            look = {"dynamic_ncols": True, "smoothing": 0.1, "leave": leave}
            bar = tqdm(total=total, initial=initial, unit=unit, desc=what or None, **look)
            self._bar = self._stack.enter_context(bar)

    def update(self, count: int = 1, values: Mapping[str, float | str | None] = MappingProxyType({})) -> None:
        """Add `count` finished units; numbers are shown with three digits, None is omitted."""
        self.done += count
        shown = {n: v if isinstance(v, str) else f"{v:.3f}" for n, v in values.items() if v is not None}
        if self._bar is not None:
            self._bar.set_postfix(shown, refresh=False)
            self._bar.update(count)
        elif self._lines:
            self._say(shown)

    def _say(self, shown: dict[str, str]) -> None:
        now = time.perf_counter()
        if now < self._next and self.done < self.total:
            return
        each = (now - self._logged_at) / max(1, self.done - self._logged)
        parts = [f"{self.unit} {self.done}/{self.total}", *(f"{name} {value}" for name, value in shown.items())]
        parts += [f"{each:.2g} s/{self.unit}"]
        if self.done < self.total:
            parts += [f"{duration(each * (self.total - self.done))} left"]
        logger.info("%s", "  ".join(parts))
        self._logged, self._logged_at, self._next = self.done, now, now + EVERY

    def go_back(self, step: int) -> None:
        """Return to an earlier `step`."""
        self.done = min(self.done, step)
        self._logged = min(self._logged, step)
        if self._bar is not None:
            self._bar.n = self._bar.last_print_n = self.done
            self._bar.refresh()

    def close(self) -> None:
        """Close the bar and restore the log's console; may be called twice."""
        self._stack.close()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
