"""Spans of the workers' calls as seen by the driver, and durations of the parts of a step.

A call starts when it is submitted and the worker is free, and ends when the driver notices its end.
"""

import contextlib
import threading
import time
from collections.abc import Collection, Iterator
from typing import Literal, NamedTuple, Protocol

What = Literal["draw", "score", "update", "validate", "save", "load"]
MOST = 256  # spans per step: with more, consecutive ones of a worker are joined
DRIVER = "run"  # the lane of the run as a whole


class Call(Protocol):
    """A call of a worker (`gerl.cluster`); without a reference it was made in this process and has ended."""

    @property
    def worker(self) -> str: ...

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
        self._running: dict[Call, tuple[What, int, float]] = {}
        self._free: dict[str, float] = {}  # worker -> end of its last call

    def add(self, worker: str, what: What, start: float) -> None:
        """Add a span of `worker` from `start`, a time of `time.perf_counter`, until now."""
        with self._lock:
            self._spans.append(Span(worker, what, self.step, self._zero + start, self._zero + time.perf_counter()))

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
            self.add(call.worker, what, start)
            return
        with self._lock:
            self._running[call] = what, self.step, start

    def ended(self, calls: Collection[Call]) -> None:
        """Add the spans of calls that have ended; unknown calls are ignored."""
        now = time.perf_counter()
        with self._lock:
            for call in calls:
                if (found := self._running.pop(call, None)) is not None:
                    what, step, start = found
                    begun = max(start, self._free.get(call.worker, 0.0))
                    self._free[call.worker] = now
                    self._spans.append(Span(call.worker, what, step, self._zero + begun, self._zero + now))

    def forget(self) -> None:
        """Drop the running calls."""
        with self._lock:
            self._running.clear()

    def take(self) -> list[Span]:
        """Return the spans since the last call, about `MOST` at most, in order of their start."""
        with self._lock:
            spans, self._spans = sorted(self._spans, key=lambda span: span.start), []
        return spans if len(spans) <= MOST else joined(spans)


def joined(spans: list[Span]) -> list[Span]:
    """Join consecutive spans of a worker, with growing tolerance for pauses, until few enough remain."""
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
    """Sums of seconds by name, `timing/NAME_s` in `metrics`; phases of a step are also added to the timeline."""

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
        """Return a new stopwatch with the same timeline."""
        return Stopwatch(self.timeline)

    def metrics(self) -> dict[str, float]:
        return {f"timing/{name}_s": seconds for name, seconds in self.seconds.items()}
