"""Scorer processes: start, restart, waiting for resources in Ray; time-outs of their calls, and their load."""

import logging
import math
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from gerl.cluster import AGAIN, Pending, WorkerGroup
from gerl.errors import RewardError, WorkerDied
from gerl.rewards.worker import RewardWorker

logger = logging.getLogger(__name__)
PAUSE = 1.0  # seconds before a process that died while starting is started again
J = TypeVar("J")  # the kind of the queued calls


@dataclass(frozen=True)
class Start:
    """Starting process. `until`: deadline for getting resources; None: placed and building its scorers.

    `build`: the call that builds them once it is placed, while the driver may wait for something else.
    """

    process: int
    until: float | None = None
    build: Pending[None] | None = None


@dataclass(eq=False)
class Pool(Generic[J]):
    """Pool of identical processes, with a queue of calls."""

    workers: WorkerGroup[RewardWorker]
    timeout: float
    patience: float = math.inf  # seconds to wait for resources of a process
    idle: list[int] = field(default_factory=list)
    starting: dict[Pending[None], Start] = field(default_factory=dict)  # not subject to `timeout`
    queue: deque[J] = field(default_factory=deque)
    died: set[int] = field(default_factory=set)  # while starting, at the last attempt

    def start(self, process: int, until: float | None = None) -> None:
        """Start a process, which builds its scorers as soon as Ray has placed it."""
        if not self.workers.remote:
            self.starting[self.workers.submit(process, RewardWorker.build)] = Start(process)
            return
        until = time.perf_counter() + self.patience if until is None else until
        placed = self.workers.submit(process, RewardWorker.ping)
        self.starting[placed] = Start(process, until, self.workers.submit(process, RewardWorker.build))

    def start_all(self) -> None:
        """Start all processes again after a restart of Ray."""
        self.idle, self.starting, self.died = [], {}, set()
        self.workers.forget()
        for process in range(len(self.workers)):
            self.renew(process)

    def renew(self, process: int, until: float | None = None) -> None:
        """End a process, even if it is working, and start a replacement."""
        self.idle = [other for other in self.idle if other != process]
        self.workers.restart(process)
        self.start(process, until)

    def started(self, pending: Pending[None]) -> None:
        """Make a process available, or restart it once if it died; raises `RewardError` if it failed or died again."""
        start = self.starting.pop(pending)
        process, until = start.process, start.until
        try:
            pending.result()
        except WorkerDied as error:
            if until is not None and time.perf_counter() < until < math.inf:
                time.sleep(PAUSE)  # its machine may have died too, which Ray has not noticed yet
                self.renew(process, until)
                return
            if process in self.died:
                raise RewardError(f"a process failed to start: {error}") from None
            logger.warning("%s; it is started again", str(error).removesuffix(f"; {AGAIN}"))
            self.died.add(process)
            self.renew(process)
            return
        if start.build is not None:
            self.starting[start.build] = Start(process)
            return
        self.died.discard(process)
        self.idle.append(process)

    @property
    def unplaced(self) -> dict[Pending[None], Start]:
        """Processes that Ray has not placed yet."""
        return {pending: start for pending, start in self.starting.items() if start.until is not None}

    def check_room(self) -> None:
        """Stop waiting for processes not placed in time; they join later. Raises `RewardError` if none was placed."""
        if not self.starting:
            return
        now, late, count = time.perf_counter(), self.unplaced, len(self.workers)
        for pending, start in late.items():
            if start.until is None or start.until > now or self._extend_deadline(pending, start.process):
                continue
            if len(late) == count:
                raise self._no_room()
            name, left = f"{self.workers.name} {start.process}", count - len(late)
            logger.warning("Ray has no room for %s: the run continues with %d of %d processes", name, left, count)
            self.starting[pending] = replace(start, until=math.inf)

    def wait_until_ready(self, process: int) -> None:
        """Wait until a process has built its scorers; raises `RewardError` if it cannot, or Ray cannot place it."""
        while pending := [pending for pending, start in self.starting.items() if start.process == process]:
            until = self.starting[pending[0]].until or math.inf
            left = until - time.perf_counter()
            if not pending[0].wait(max(0.0, left) if left < math.inf else pending[0].hang_after):
                if not self._extend_deadline(pending[0], process):
                    raise self._no_room()
                continue
            self.started(pending[0])

    def interrupted_at(self, name: str, error: BaseException) -> str:
        """Return where a scorer in this process was interrupted by `error`."""
        return self.workers.workers[0].scorers[name].place(error)

    def _extend_deadline(self, pending: Pending[None], process: int) -> bool:
        """Extend the wait for a process that was placed but has not started; return whether it was extended.

        Its Python may be on a network disk.
        """
        if not self.workers.has_room(process):
            return False
        logger.info("%s %d has been scheduled but not started yet: waiting", self.workers.name, process)
        self.starting[pending] = replace(self.starting[pending], until=time.perf_counter() + self.patience)
        return True

    def _no_room(self) -> RewardError:
        from gerl.cluster.placement import no_room  # here: imports Ray, which has no room

        message = no_room(self.workers.name.removesuffix(", process"), self.workers.needs)
        return RewardError(
            f"{message}, after cluster.patience={self.patience:g} s; add a machine, or lower cluster.num_workers or "
            "reward.scorers.NAME.gpus"
        )


@dataclass
class ScorerLoad:
    """Load of a scorer: calls, images, seconds and problems."""

    calls: int = 0
    images: int = 0
    seconds: float = 0.0
    queued: float = 0.0
    retries: int = 0
    restarts: int = 0
    warnings: int = 0

    def metrics(self, name: str) -> dict[str, float]:
        """Return the metrics of scorer `name`: latency and queue seconds per call, images per second, and problems."""
        calls = max(self.calls, 1)
        values = {"latency_s": self.seconds / calls, "queue_s": self.queued / calls}
        values["images_per_s"] = self.images / self.seconds if self.seconds else 0.0
        values |= {"retries": float(self.retries), "restarts": float(self.restarts), "warnings": float(self.warnings)}
        return {f"scorer/{name}/{key}": value for key, value in values.items()}


class Overdue(BaseException):
    """Time-out of a scorer in this process; not an `Exception`, which the scorer might catch."""


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raise `Overdue` in Python code that runs longer, if possible: only in the main thread."""
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*_: object) -> None:
        raise Overdue

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL if before is None else before)
