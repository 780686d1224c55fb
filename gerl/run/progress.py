"""Progress of a command: a bar on a terminal, elsewhere an occasional line in the log."""

import contextlib
import logging
import sys
import time
from collections.abc import Mapping
from types import MappingProxyType

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from gerl.commandline.command import duration

logger = logging.getLogger("gerl")
EVERY = 30.0  # seconds between two lines, at least


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
            self._stack.enter_context(logging_redirect_tqdm())
            bar = tqdm(
                total=total,
                initial=initial,
                unit=unit,
                desc=what or None,
                leave=leave,
                dynamic_ncols=True,
                smoothing=0.1,
            )
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
