"""The work of each worker from when to when, as the driver sees it, and the time that the parts of a step take.

Calls begin when they are submitted and end when their end is noticed, and a worker does one after the other.
"""

import contextlib
import threading
import time
from collections.abc import Collection, Iterator
from typing import Literal, NamedTuple, Protocol

What = Literal["draw", "score", "update", "validate", "save", "load"]
MOST = 256  # spans of a step: in one with more, those of a worker that follow each other are one
DRIVER = "run"  # the lane of the run as a whole


class Call(Protocol):
    """A call of a worker, as `gerl.cluster` has it: without a reference it was made in this process, and has ended."""

    @property
    def worker(self) -> str: ...

    @property
    def reference(self) -> object: ...


class Span(NamedTuple):
    """`start` and `end` in seconds of the clock, counted on monotonically from the begin of the process."""

    worker: str
    what: What
    step: int
    start: float
    end: float


class Timeline:
    """Collects the spans of a step until they are taken; several threads may add to it."""

    def __init__(self) -> None:
        self.step = 0  # the one that is done
        self._zero = time.time() - time.perf_counter()
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        self._running: dict[Call, tuple[What, int, float]] = {}
        self._free: dict[str, float] = {}  # worker -> the end of its last call

    def now(self) -> float:
        """Seconds of the clock, which never go back."""
        return self._zero + time.perf_counter()

    def add(self, worker: str, what: What, start: float) -> None:
        """`worker` has done something since `start`."""
        with self._lock:
            self._spans.append(Span(worker, what, self.step, start, self.now()))

    @contextlib.contextmanager
    def span(self, what: What, *workers: str) -> Iterator[None]:
        """A block in which all of the `workers`, by default the run as a whole, do something."""
        start = self.now()
        try:
            yield
        finally:
            for worker in workers or (DRIVER,):
                self.add(worker, what, start)

    def submitted(self, call: Call, what: What, start: float) -> None:
        """A call was submitted at `start`; one in this process has ended by now."""
        if call.reference is None:
            self.add(call.worker, what, start)
            return
        with self._lock:
            self._running[call] = what, self.step, start

    def ended(self, calls: Collection[Call]) -> None:
        """These calls have ended; those that were never said to be submitted do not count."""
        now = self.now()
        with self._lock:
            for call in calls:
                if (found := self._running.pop(call, None)) is not None:
                    what, step, start = found
                    begun = max(start, self._free.get(call.worker, 0.0))
                    self._free[call.worker] = now
                    self._spans.append(Span(call.worker, what, step, begun, now))

    def forget(self) -> None:
        """Calls that were given up end for nothing."""
        with self._lock:
            self._running.clear()

    def take(self) -> list[Span]:
        """The spans since the last time, at most `MOST` and a few, in the order of their begins."""
        with self._lock:
            spans, self._spans = sorted(self._spans, key=lambda span: span.start), []
        return spans if len(spans) <= MOST else joined(spans)


def joined(spans: list[Span]) -> list[Span]:
    """Spans of a worker that follow each other without a pause worth seeing, as one; the pause grows until it fits."""
    pause = 1e-3
    whole = max(span.end for span in spans) - min(span.start for span in spans)
    while len(spans) > MOST and pause < 2 * whole + 1:
        last: dict[tuple[str, What, int], int] = {}
        found: list[Span] = []
        for span in spans:
            kind = span.worker, span.what, span.step
            i = last.get(kind)
            if i is not None and span.start - found[i].end <= pause:
                found[i] = found[i]._replace(end=max(span.end, found[i].end))
            else:
                last[kind] = len(found)
                found.append(span)
        spans, pause = found, 4 * pause
    return spans


PHASES: dict[str, What] = {"rollout": "draw", "reward_wait": "score", "update": "update", "validation": "validate"}


class Stopwatch:
    """Adds up seconds by name; `metrics` gives them as `timing/<name>_s`, and the timeline gets the run's phases."""

    def __init__(self, timeline: Timeline | None = None) -> None:
        self.seconds: dict[str, float] = {}
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
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def restarted(self) -> "Stopwatch":
        """Another one that has measured nothing."""
        return Stopwatch(self.timeline)

    def metrics(self) -> dict[str, float]:
        return {f"timing/{name}_s": seconds for name, seconds in self.seconds.items()}
