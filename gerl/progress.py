"""Progress of a command: spans and durations of its parts, a progress bar, and log lines during long waits."""

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple, Protocol

logger = logging.getLogger("gerl")

# --- Spans of the workers' calls as seen by the driver, and durations of the parts of a step
#
# A call starts when it is submitted and the worker is free, and ends when the driver notices its end.

What = Literal["sample", "score", "update", "validate", "save", "load"]
MAX_SPANS = 256  # spans per step: with more, consecutive ones of a worker are joined
DRIVER = "run"  # the lane of the run as a whole


class Call(Protocol):
    """A call of a worker (`gerl.cluster`); without a reference it was made in this process and has ended."""

    @property
    def worker(self) -> str: ...

    @property
    def description(self) -> str: ...

    @property
    def reference(self) -> object: ...


class Span(NamedTuple):
    """`start` and `end` in seconds since the epoch, monotonic within the process."""

    worker: str
    what: What
    step: int
    start: float
    end: float


class Timeline:
    """Thread-safe collection of the spans of a step."""

    def __init__(self) -> None:
        self.step = 0  # the current step
        self._zero = time.time() - time.perf_counter()
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        self.running: dict[Call, tuple[What, int, float]] = {}
        self._free: dict[str, float] = {}  # worker -> end of its last call

    def add(self, worker: str, what: What, start: float, description: str = "") -> None:
        """Add a span of `worker` from `start`, a time of `time.perf_counter`, until now; `description`: for the log."""
        now = time.perf_counter()
        with self._lock:
            self._spans.append(Span(worker, what, self.step, self._zero + start, self._zero + now))
        logger.debug("step %d: %s: %s: %.2f s", self.step, worker, description or what, now - start)

    @contextlib.contextmanager
    def span(self, what: What, *workers: str) -> Iterator[None]:
        """Add the block as a span of all `workers`, by default of the driver."""
        start = time.perf_counter()
        try:
            yield
        finally:
            for worker in workers or (DRIVER,):
                self.add(worker, what, start)

    def submitted(self, call: Call, what: What, start: float) -> None:
        """Record a call submitted at `start`; one in this process has ended by now."""
        if call.reference is None:
            self.add(call.worker, what, start, call.description)
            return
        with self._lock:
            self.running[call] = what, self.step, start

    def ended(self, calls: Collection[Call]) -> None:
        """Add the spans of calls that have ended; unknown calls are ignored."""
        now = time.perf_counter()
        with self._lock:
            for call in calls:
                if (call_record := self.running.pop(call, None)) is not None:
                    what, step, start = call_record
                    begun = max(start, self._free.get(call.worker, 0.0))
                    self._free[call.worker] = now
                    self._spans.append(Span(call.worker, what, step, self._zero + begun, self._zero + now))
                    logger.debug("step %d: %s: %s: %.2f s", step, call.worker, call.description or what, now - begun)

    def forget(self) -> None:
        """Drop the running calls."""
        with self._lock:
            self.running.clear()

    def take(self) -> list[Span]:
        """Return the spans since the last call, about `MAX_SPANS` at most, in order of their start."""
        with self._lock:
            spans, self._spans = sorted(self._spans, key=lambda span: span.start), []
        return spans if len(spans) <= MAX_SPANS else joined(spans)


def joined(spans: list[Span]) -> list[Span]:
    """Join consecutive spans of a worker, with growing tolerance for pauses, until few enough remain."""
    pause = 1e-3
    whole = max(span.end for span in spans) - min(span.start for span in spans)
    while len(spans) > MAX_SPANS and pause < 2 * whole + 1:
        last: dict[tuple[str, What, int], int] = {}
        merged: list[Span] = []
        for span in spans:
            kind = span.worker, span.what, span.step
            i = last.get(kind)
            if i is not None and span.start - merged[i].end <= pause:
                merged[i] = merged[i]._replace(end=max(span.end, merged[i].end))
            else:
                last[kind] = len(merged)
                merged.append(span)
        spans, pause = merged, 4 * pause
    return spans


PHASES: dict[str, What] = {"rollout": "sample", "reward_wait": "score", "update": "update", "validation": "validate"}


class Stopwatch:
    """Sums of seconds as metrics `timing/NAME_s`; phases of a step are also added to the timeline."""

    def __init__(self, timeline: Timeline | None = None) -> None:
        self.metrics: dict[str, float] = {}
        self.timeline = timeline

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        phase = PHASES.get(name) if self.timeline is not None else None
        shown = self.timeline.span(phase) if self.timeline is not None and phase else contextlib.nullcontext()
        try:
            with shown:
                yield
        finally:
            key = f"timing/{name}_s"
            self.metrics[key] = self.metrics.get(key, 0.0) + time.perf_counter() - start


# --- A bar on a terminal, lines in the log elsewhere, and lines about what a command waits for

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
        parts += [f"{duration(each) if each >= 90 else f'{each:.2g} s'}/{self.unit}"]
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
