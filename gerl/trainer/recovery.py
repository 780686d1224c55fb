"""Workers that die or hang are replaced, and all go back to the last finished step.

Everything drawn derives from the seed, the step and the task, so that what is done again is bitwise what it was.
"""

import contextlib
import logging
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from gerl.cluster import LAST_WORDS, Cluster, Pending, WorkerGroup, wait_all, wait_any
from gerl.config import Config
from gerl.errors import ClusterError, RayDied
from gerl.workers.hybrid import HybridWorker
from gerl.workers.keeping import Snapshot

logger = logging.getLogger(__name__)
HOUR = 3600.0
PAUSE = 1.0  # seconds before a worker that died as it began is started once more
LARGEST = 2**30  # bytes of a LoRA and its optimizer that are kept outside of the workers as well
BYTES = 16  # of a trained parameter: its value, two moments and an average, in fp32


def _died(call: Pending[None]) -> bool:
    try:
        call.result()
    except ClusterError:
        return True
    return False


class WentBack(Exception):
    """The run goes on from an earlier step."""


class NoRoom(ClusterError):
    """No worker can take the place of those that died."""


@dataclass(frozen=True)
class Roles:
    """The workers of a run, and which of them train and which draw: the same, but for cluster.layout=split."""

    all: WorkerGroup[HybridWorker]
    training: WorkerGroup[HybridWorker]  # the first of all
    drawing: WorkerGroup[HybridWorker]  # the last of all

    @classmethod
    def of(cls, workers: WorkerGroup[HybridWorker], cluster: Cluster) -> "Roles":
        """The roles of `workers` that `cluster` has just started."""
        count = cluster.processes
        if cluster.config.layout == "hybrid":
            return cls(workers, workers, workers)
        return cls(workers, workers.part(range(cluster.training)), workers.part(range(cluster.training, count)))

    def meet(self, lockstep: bool, hang_after: float) -> None:
        """Let processes meet for their collective calls; one alone has nobody to meet.

        Those that only draw make collective calls where they are in `lockstep`.
        """
        for group in [self.training, self.drawing] if lockstep and self.drawing is not self.all else [self.training]:
            if group.remote and (count := len(group)) > 1:
                (address,) = wait_all([group.submit(0, HybridWorker.address)], hang_after)
                calls = [group.submit(i, HybridWorker.join, address, i, count) for i in range(count)]
                wait_all(calls, hang_after)


class Recovery:
    """Replaces workers, and counts how often and for how long.

    A worker that begins has to be set up: it and the others meet, it loads the model, and all are given the same state.
    """

    def __init__(self, config: Config, roles: Roles) -> None:
        self.settings, self.roles, self.workers = config.cluster, roles, roles.all
        self.ranks = config.cluster.ranks_per_worker if config.lockstep else 1
        # groups of processes in which weights are divided end with one of them: all are started anew
        self.together = config.lockstep or config.model.train != "lora"
        self.restarts, self.seconds = 0, 0.0  # since they were last asked for
        self._times: deque[float] = deque()  # of replacements within an hour
        self._late: list[tuple[int, HybridWorker, Pending[None]]] = []  # number, handle, first answer
        self._snapshot: tuple[int, Pending[Snapshot]] | None = None

    def remember(self, step: int, parameters: int) -> None:
        """Keep the state of `step`, the last finished one, in Ray's store, for when no worker that has it is left."""
        if self.workers.remote and not self.together and parameters * BYTES <= LARGEST:
            self._snapshot = step, self.workers.submit(0, HybridWorker.snapshot, step)

    def lost(self, error: Exception | None = None) -> list[int]:
        """The workers that died or do not answer; all others leave what they were doing.

        None where Ray itself is gone. `error`: what came of it. One that does not say that a worker is gone may have
        another reason: then none is lost unless one died.
        """
        if not self.workers.remote or isinstance(error, RayDied):
            return []
        asked = {self.workers.submit(i, HybridWorker.leave): i for i in range(len(self.workers))}
        if not isinstance(error, ClusterError | None) and not self._one_died(asked):
            return []
        until, found = time.monotonic() + self.settings.hang_after, list[int]()
        for call, i in asked.items():
            if not call.wait(max(0.0, until - time.monotonic())):
                self.workers.end(i)  # who else waits for it, for a checkpoint say, need wait no longer
                found.append(i)
            elif _died(call):
                found.append(i)
        return found

    def _one_died(self, asked: Collection[Pending[None]]) -> bool:
        left, until = list(asked), time.monotonic() + LAST_WORDS
        while left and time.monotonic() < until:
            for call in wait_any(left, until - time.monotonic()):
                if _died(call):
                    return True
                left.remove(call)
        return False

    def state(self, step: int, lost: Collection[int]) -> Snapshot | None:
        """The state after `step`, the last finished one, from a worker that lives, or as remembered; else None."""
        training = self.roles.training  # the first of all, and so numbered as these
        calls = [training.submit(i, HybridWorker.snapshot, step) for i in range(len(training)) if i not in lost]
        if self._snapshot is not None and self._snapshot[0] == step:
            calls.append(self._snapshot[1])
        for call in calls:
            with contextlib.suppress(ClusterError):
                if call.wait(self.settings.hang_after):
                    return call.result()
        return None

    def allow(self, lost: Sequence[int], error: Exception) -> None:
        """Count the replacement of workers; raises `error` if there were too many."""
        now, most = time.monotonic(), self.settings.max_restarts
        while self._times and self._times[0] < now - HOUR:
            self._times.popleft()
        if (count := len(self._times) + len(lost)) > most:
            if most:
                error.add_note(f"{count} workers died within an hour, and cluster.max_restarts={most}")
            raise error
        self._times.extend(now for _ in lost)
        self.restarts += len(lost)

    def restart(self, lost: Sequence[int]) -> list[int]:
        """Start the workers `lost` anew, or all; returns those that have to be set up.

        Those for which there is no room are left out. Raises `NoRoom` if that is all.
        """
        workers = self.workers
        chosen = list(range(len(workers))) if self.together else list(lost)
        asked = {i: self._anew(i) for i in chosen}
        until = time.monotonic() + self.settings.patience
        for i in chosen:
            while (left := until - time.monotonic()) > 0 and asked[i].wait(left) and _died(asked[i]):
                time.sleep(PAUSE)  # it was on a node that has died, too, of which Ray does not know yet
                asked[i] = self._anew(i)
        late = {i // self.ranks for i, call in asked.items() if not call.wait(0.0) or _died(call)}
        out = [i for i in chosen if i // self.ranks in late]  # a worker does nothing without one of its ranks
        gone = {workers.numbers[i] for i in out}
        if any(gone.issuperset(group.numbers) for group in (self.roles.training, self.roles.drawing)):
            raise NoRoom(
                f"Ray has no room for {len(out)} workers in place of those that died, after cluster.patience="
                f"{self.settings.patience:g} s: ray status shows why"
            )
        numbers = [workers.numbers[i] for i in chosen if i not in out]
        for i in reversed(out):
            self._late.append((*workers.leave_out(i), asked[i]))
        if out:
            logger.warning("Ray has no room for %d of the workers: the run goes on with %d", len(out), len(workers))
        return [workers.numbers.index(number) for number in numbers]

    def _anew(self, index: int) -> Pending[None]:
        self.workers.restart(index)
        return self.workers.submit(index, HybridWorker.leave)

    def take_in(self) -> list[int]:
        """Let workers that were left out join the others where there is room now; returns those to be set up."""
        ready = [late for late in self._late if late[2].wait(0.0)]
        count = {number // self.ranks: 0 for number, *_ in ready}
        for number, *_ in ready:
            count[number // self.ranks] += 1
        chosen = [late for late in ready if count[late[0] // self.ranks] == self.ranks]
        if not chosen:
            return []
        self._late = [late for late in self._late if late not in chosen]
        for number, worker, _ in chosen:
            self.workers.take_in(number, worker)
        logger.info("there is room for %d more workers: the run goes on with %d", len(chosen), len(self.workers))
        return [self.workers.numbers.index(number) for number, *_ in chosen]

    def count_again(self, rows: Iterable[Mapping[str, float | None]]) -> None:
        """Count the workers and seconds that `rows` of the metrics, of steps to be done again, say were lost."""
        for row in rows:
            self.restarts += int(row.get("cluster/restarts") or 0)
            self.seconds += row.get("cluster/lost_s") or 0.0

    def metrics(self) -> dict[str, float]:
        """Workers replaced and seconds lost by it since the last time; nothing if there were none."""
        found = {"cluster/restarts": float(self.restarts), "cluster/lost_s": self.seconds} if self.restarts else {}
        self.restarts, self.seconds = 0, 0.0
        return found
