"""Replacement of workers that die or hang, and restoration of the last finished step on all of them.

Everything sampled derives from the seed, the step and the task, so repeated steps are bitwise equal.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from gerl.cluster import LAST_WORDS, Pending, WorkerGroup, wait_any
from gerl.config import Config
from gerl.errors import ClusterError, RayDied
from gerl.run.checkpoint import RunState, WorkerFiles
from gerl.workers.worker import PolicyWorker

logger = logging.getLogger(__name__)
HOUR_S = 3600.0
RETRY_S = 1.0  # pause before restarting a worker that died at start
POLL_S = 0.5  # between checks whether a copy is still needed
LARGEST = 2**30  # maximum size in bytes of a LoRA and its optimizer that are also kept outside the workers, twice
Workers = WorkerGroup[PolicyWorker]
BYTES = 16  # per trained parameter: its value, two moments and an average, in fp32


def _died(call: Pending[None]) -> bool:
    try:
        call.result()
    except ClusterError:
        return True
    return False


class NoCapacity(ClusterError):
    """No room for workers to replace those that died."""


@dataclass
class Copy:
    """A finished step outside the workers: the driver's state, and theirs once it has arrived (None: it was lost)."""

    run: RunState
    workers: Future[WorkerFiles | None]

    @property
    def arrived(self) -> bool:
        """Whether the workers' state is here."""
        return self.workers.done() and self.workers.result() is not None


class Recovery:
    """Replacement of workers: a new one is set up and joins the others, and then all load the same state."""

    def __init__(self, config: Config, workers: Workers, trainers: Workers, samplers: Workers) -> None:
        """`trainers`, `samplers`: the groups of `workers` that train, which come first, and that sample."""
        self.settings, self.workers, self.trainers, self.samplers = config.cluster, workers, trainers, samplers
        self.ranks = config.cluster.ranks_per_worker if config.lockstep else 1
        # processes that share weights end together, so all are restarted
        self.together = config.lockstep or config.model.train != "lora"
        self.restarts, self.seconds = 0, 0.0  # since the last call of `metrics`
        self._times: deque[float] = deque()  # of replacements within an hour
        self._late: dict[int, tuple[PolicyWorker, Pending[None]] | None] = {}  # by number; None: not requested yet
        self._executor, self._over = ThreadPoolExecutor(1, "copy"), threading.Event()
        self._copies: list[Copy] = []  # from the newest that has arrived on, in order of steps

    def remember(self, state: RunState, parameters: int) -> None:
        """Keep the last finished step in this process, in case all workers die; the one before, until it has arrived.

        `state`: after that step, see `update_copy`.
        """
        if self.workers.remote and not self.together and parameters * BYTES <= LARGEST:
            call = self.workers.submit(0, PolicyWorker.checkpoint, state.step)
            before = [each for each in self._copies if each.run.step < state.step]
            newest = max((i for i, each in enumerate(before) if each.arrived), default=0)
            fetched = self._executor.submit(self._fetch, call)  # while the run continues
            self._copies = [*before[newest:], Copy(copy.deepcopy(state), fetched)]

    def update_copy(self, state: RunState) -> None:
        """Replace the driver's state in the copy of the last finished step, which has been validated and logged."""
        if self._copies and self._copies[-1].run.step == state.step:
            self._copies[-1].run = copy.deepcopy(state)

    def _fetch(self, call: Pending[WorkerFiles]) -> WorkerFiles | None:
        until = time.monotonic() + self.settings.hang_after
        with contextlib.suppress(Exception):  # of a worker that died: the others have the state
            while not self._over.is_set() and time.monotonic() < until:
                if call.wait(POLL_S):
                    return call.ended()
        return None

    def copy_of(self, step: int) -> WorkerFiles | None:
        """Return the checkpoint of `step` if it was kept in this process, else None."""
        return next((each.workers.result() for each in self._copies if each.run.step == step), None)

    def newest_copy(self) -> tuple[RunState, WorkerFiles] | None:
        """Return the newest step kept in this process: the driver's state and that of the workers."""
        for each in reversed(self._copies):
            if (workers := each.workers.result()) is not None:
                return copy.deepcopy(each.run), workers
        return None

    def close(self) -> None:
        """Stop fetching before Ray ends; what has arrived remains available."""
        self._over.set()
        for each in self._copies:
            each.workers.result()

    def forget_workers(self) -> None:
        """Forget the workers of a Ray that died and is about to be restarted."""
        self.close()
        self._over = threading.Event()
        self._late.clear()

    def lost(self, error: Exception | None = None) -> list[int]:
        """Return the workers that died or hang, and let others abandon the step; none if `error` has another cause."""
        if not self.workers.remote or isinstance(error, RayDied):
            return []
        asked = {self.workers.submit(i, PolicyWorker.leave): i for i in range(len(self.workers))}
        if not isinstance(error, ClusterError | None) and not self._one_died(asked):
            return []
        until, numbers = time.monotonic() + self.settings.hang_after, list[int]()
        for call, i in asked.items():
            if not call.wait(max(0.0, until - time.monotonic())):
                self.workers.end(i)  # unblocks processes that wait for it, for example for a checkpoint
                numbers.append(i)
            elif _died(call):
                numbers.append(i)
        return numbers

    def _one_died(self, asked: Collection[Pending[None]]) -> bool:
        left, until = list(asked), time.monotonic() + LAST_WORDS
        while left and time.monotonic() < until:
            for call in wait_any(left, until - time.monotonic()):
                if _died(call):
                    return True
                left.remove(call)
        return False

    def state(self, step: int, lost: Collection[int]) -> WorkerFiles | None:
        """Return the checkpoint of `step`, the last finished one, from this process or a live worker; else None."""
        if state := self.copy_of(step):
            return state
        training = [i for i in range(len(self.trainers)) if i not in lost]
        calls = [self.trainers.submit(i, PolicyWorker.checkpoint, step) for i in training]
        for call in calls:
            with contextlib.suppress(ClusterError):
                if call.wait(self.settings.hang_after):
                    return call.result()
        return None

    def allow(self, lost: Sequence[int], error: Exception, deaths: int) -> None:
        """Count the replacement of workers after `deaths`. Raises `error` if there were too many within an hour."""
        now, most = time.monotonic(), self.settings.max_restarts
        while self._times and self._times[0] < now - HOUR_S:
            self._times.popleft()
        if (count := len(self._times) + deaths) > most:
            if most:
                error.add_note(f"{count} workers died within an hour, and cluster.max_restarts={most}")
            raise error
        self._times.extend(now for _ in range(deaths))
        self.restarts += len(lost)

    def restart(self, lost: Sequence[int]) -> list[int]:
        """Restart the workers `lost`, or all; return those to be set up. Raises `NoCapacity` if none has room."""
        workers = self.workers
        chosen = list(range(len(workers))) if self.together else list(lost)
        asked = {i: self._anew(i) for i in chosen}
        until = time.monotonic() + self.settings.patience
        for i in chosen:
            while (left := until - time.monotonic()) > 0 and asked[i].wait(left) and _died(asked[i]):
                time.sleep(RETRY_S)  # its node died too, which Ray has not noticed yet
                asked[i] = self._anew(i)
        for i in chosen:
            if not asked[i].wait(0.0) and workers.has_room(i):
                logger.info("worker %d has been scheduled but not started yet: waiting", workers.numbers[i])
                asked[i].wait(self.settings.hang_after)
        late = {i // self.ranks for i, call in asked.items() if not call.wait(0.0) or _died(call)}
        out = [i for i in chosen if i // self.ranks in late]  # a worker cannot run without one of its ranks
        gone = {workers.numbers[i] for i in out}
        if any(gone.issuperset(group.numbers) for group in (self.trainers, self.samplers)):
            raise NoCapacity(
                f"Ray has no room for {len(out)} replacements of workers that died, after "
                f"cluster.patience={self.settings.patience:g} s: ray status shows why"
            )
        numbers = [workers.numbers[i] for i in chosen if i not in out]
        for i in reversed(out):
            self._late[workers.leave_out(i)] = None
        if out:
            logger.warning("Ray has no room for %d of the workers: the run continues with %d", len(out), len(workers))
        return [workers.numbers.index(number) for number in numbers]

    def _anew(self, index: int) -> Pending[None]:
        self.workers.restart(index)
        return self.workers.submit(index, PolicyWorker.leave)

    def admit(self, ask: bool = True) -> list[int]:
        """Admit missing workers if Ray can place them; return those to be set up. `ask`: request resources first."""
        if ask:
            for number in [number for number, late in self._late.items() if late is None]:
                self._late[number] = self.workers.start_beside(number, PolicyWorker.leave)
        ready = {number: late[0] for number, late in self._late.items() if late is not None and late[1].wait(0.0)}
        count = Counter(number // self.ranks for number in ready)
        chosen = {number: worker for number, worker in ready.items() if count[number // self.ranks] == self.ranks}
        for number, worker in chosen.items():
            del self._late[number]
            self.workers.take_in(number, worker)
        if chosen:
            logger.info("there is room for %d more workers: the run continues with %d", len(chosen), len(self.workers))
        return [self.workers.numbers.index(number) for number in chosen]

    def count_again(self, rows: Iterable[Mapping[str, float | None]]) -> None:
        """Add the lost workers and seconds in the metrics `rows` of steps that will be repeated."""
        for row in rows:
            self.restarts += int(row.get("cluster/restarts") or 0)
            self.seconds += row.get("cluster/lost_s") or 0.0

    def metrics(self) -> dict[str, float]:
        """Return workers replaced and seconds lost since the last call; empty if there were none."""
        metrics = {"cluster/restarts": float(self.restarts), "cluster/lost_s": self.seconds} if self.restarts else {}
        self.restarts, self.seconds = 0, 0.0
        return metrics
