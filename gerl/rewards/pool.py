"""The processes of scorers: started, restarted, and waited for where Ray has no room for them; and calls of them."""

import logging
import math
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from gerl.cluster import AGAIN, Pending, WorkerGroup, no_room
from gerl.errors import RewardError, WorkerDied
from gerl.rewards.worker import RewardWorker

logger = logging.getLogger(__name__)
PAUSE = 1.0  # seconds before a process that died as it began is started once more


R = TypeVar("R")  # the images that are scored together, and what they are scored for


@dataclass(eq=False)
class Job(Generic[R]):
    """A call of a scorer: images of one micro-batch or, for a groupwise scorer, all of a group."""

    round: R
    scorer: str
    places: list[tuple[int, int]]  # (micro-batch, row)
    attempts: int = 0
    queued: float = field(default_factory=time.perf_counter)
    polls: int = 0  # times that people had not answered yet
    wake: float = 0.0  # when they are asked again


@dataclass(frozen=True)
class Start:
    """A process that starts: until when room for it is waited for; None: it has room and builds its scorers."""

    process: int
    until: float | None = None


@dataclass
class Pool(Generic[R]):
    """Processes that are alike, and the calls that wait for one of them."""

    workers: WorkerGroup[RewardWorker]
    timeout: float
    patience: float = math.inf  # seconds for which room for a process is waited for
    idle: list[int] = field(default_factory=list)
    starting: dict[Pending[None], Start] = field(default_factory=dict)  # not part of what `timeout` limits
    queue: deque[Job[R]] = field(default_factory=deque)
    died: set[int] = field(default_factory=set)  # while they started, the last time

    def start(self, process: int, until: float | None = None) -> None:
        """Have a new process build its scorers, as soon as it has room."""
        if not self.workers.remote:
            self.starting[self.workers.submit(process, RewardWorker.ready)] = Start(process)
            return
        until = time.perf_counter() + self.patience if until is None else until
        self.starting[self.workers.submit(process, RewardWorker.here)] = Start(process, until)

    def start_all(self) -> None:
        """Start all processes anew: the Ray that had them is gone."""
        self.idle, self.starting, self.died = [], {}, set()
        self.workers.forget()
        for process in range(len(self.workers)):
            self.renew(process)

    def renew(self, process: int, until: float | None = None) -> None:
        """End a process, whatever it does, and start another in its place."""
        self.idle = [other for other in self.idle if other != process]
        self.workers.restart(process)
        self.start(process, until)

    def started(self, pending: Pending[None]) -> None:
        """Give a process whose scorers are built to work; one that died meanwhile is started once more.

        Raises `RewardError` if it could not build them, or died again.
        """
        start = self.starting.pop(pending)
        process, until = start.process, start.until
        try:
            pending.result()
        except WorkerDied as error:
            if until is not None and time.perf_counter() < until < math.inf:
                time.sleep(PAUSE)  # it was on a machine that has died, too, of which Ray does not know yet
                self.renew(process, until)
                return
            if process in self.died:
                raise RewardError(f"a process failed to start: {error}") from None
            logger.warning("%s; it is started again", str(error).removesuffix(f"; {AGAIN}"))
            self.died.add(process)
            self.renew(process)
            return
        if until is not None:
            self.starting[self.workers.submit(process, RewardWorker.ready)] = Start(process)
            return
        self.died.discard(process)
        self.idle.append(process)

    @property
    def late(self) -> dict[Pending[None], Start]:
        """The processes that have no room yet."""
        return {pending: start for pending, start in self.starting.items() if start.until is not None}

    def look_for_room(self) -> None:
        """Go on without processes for which there was no room in time; they join the others when there is some.

        Raises `RewardError` if no process has room.
        """
        now, late, count = time.perf_counter(), self.late, len(self.workers)
        over = {pending: start for pending, start in late.items() if start.until is not None and start.until <= now}
        over = {pending: start for pending, start in over.items() if not self._starts_slowly(pending, start.process)}
        if over and len(late) == count:
            raise self._without_room()
        for pending, start in over.items():
            name, left = f"{self.workers.name} {start.process}", count - len(late)
            logger.warning("Ray has no room for %s: the run continues with %d of %d processes", name, left, count)
            self.starting[pending] = Start(start.process, math.inf)

    def begin(self, process: int) -> None:
        """Wait until a process has built its scorers; raises `RewardError` if it cannot, or has no room."""
        while pending := [pending for pending, start in self.starting.items() if start.process == process]:
            until = self.starting[pending[0]].until or math.inf
            left = until - time.perf_counter()
            if not pending[0].wait(max(0.0, left) if left < math.inf else pending[0].hang_after):
                if not self._starts_slowly(pending[0], process):
                    raise self._without_room()
                continue
            self.started(pending[0])

    def _starts_slowly(self, pending: Pending[None], process: int) -> bool:
        """Wait longer for a process that has room, but has not started: its Python may lie on a network disk."""
        if not self.workers.has_room(process):
            return False
        logger.info("%s %d has been scheduled but not started yet: waiting", self.workers.name, process)
        self.starting[pending] = Start(process, time.perf_counter() + self.patience)
        return True

    def _without_room(self) -> RewardError:
        said = no_room(self.workers.name.removesuffix(", process"), self.workers.needs)
        return RewardError(
            f"{said}, after cluster.patience={self.patience:g} s; add a machine, or lower cluster.num_workers or "
            "reward.scorers.NAME.gpus"
        )


@dataclass(frozen=True)
class Call(Generic[R]):
    """A job at work in a process."""

    job: Job[R]
    pool: Pool[R]
    process: int
    started: float
