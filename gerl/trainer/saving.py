"""The checkpoint of a run that trains weights themselves: written beside the training by those who hold them.

It is complete or absent, as every checkpoint. A step pays for a copy of the state in main memory.
"""

import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from gerl.cluster import WorkerGroup
from gerl.config import Config
from gerl.errors import CheckpointError
from gerl.run.state import FROZEN, STATE, WorkerState
from gerl.workers.hybrid import HybridWorker

POLL = 0.05  # seconds between questions whether a file is written


def writers(config: Config, process: int) -> list[int]:
    """The processes that have a checkpoint together: the ranks of a worker, that of `process`, or this one alone."""
    if not config.lockstep:
        return [process]
    ranks = config.cluster.ranks_per_worker
    first = process - process % ranks
    return list(range(first, first + ranks))


class Saving:
    """Writes checkpoints beside the training, one after the other."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "saving")
        self._last: Future[None] | None = None
        self._ask: Callable[[], object] = bool
        self._every: float | None = None

    def start(self, write: Callable[[], None], ask: Callable[[], object], every: float | None) -> None:
        """Begin to write a checkpoint, after the one before it, which may raise here what `finish` raises.

        `ask` raises `ClusterError` if those who write it hang; who waits for them asks `every` so many seconds.
        """
        self.finish()
        self._last, self._ask, self._every = self._executor.submit(write), ask, every

    def check(self) -> None:
        """Raise `CheckpointError` if a checkpoint could not be written, without waiting for one that is not ready."""
        if self._last is not None and self._last.done():
            self.finish()

    def finish(self) -> None:
        """Wait for what was begun; raises `CheckpointError` once if it could not be written, and what `ask` raises."""
        last, self._last = self._last, None
        if last is not None:
            while not wait([last], self._every).done:
                self._ask()
            last.result()


def hold(workers: WorkerGroup[HybridWorker], members: Sequence[int], step: int) -> WorkerState:
    """Let the processes `members` keep what they have of the checkpoint of `step` for `fill`; returns its numbers."""
    pending = [workers.submit(process, HybridWorker.hold, step) for process in members]
    numbers = [call.result() for call in pending]
    return numbers[0]


def fill(workers: WorkerGroup[HybridWorker], members: Sequence[int], folder: Path) -> None:
    """Let the processes `members` write what they hold into `folder`; they may train meanwhile.

    Raises `CheckpointError` if one cannot, or has no such folder.
    """
    place = folder.resolve()
    try:
        for number, process in enumerate(members):
            workers.submit(process, HybridWorker.start_state, place, number)
        _wait(workers, members)
        found = len(list((place / STATE).glob("*.safetensors")))
        if found != len(members):
            raise CheckpointError(
                f"{len(members)} processes wrote a checkpoint, of which {found} are in {folder.parent}: use a run "
                "folder (hydra.run.dir) shared by all machines"
            )
        workers.submit(members[0], HybridWorker.start_denoisers, place)
        _wait(workers, members[:1])
    finally:
        shutil.rmtree(place / FROZEN, ignore_errors=True)


def ask(workers: WorkerGroup[HybridWorker], members: Sequence[int]) -> None:
    """Raise `ClusterError` if one of the processes `members` does not answer."""
    for call in [workers.submit(process, HybridWorker.written) for process in members]:
        call.result()


def _wait(workers: WorkerGroup[HybridWorker], members: Sequence[int]) -> None:
    for process in members:
        while True:
            call = workers.submit(process, HybridWorker.written)
            call.wait()  # for however long: the steps that it trains meanwhile come first
            if call.ended():
                break
            time.sleep(POLL)
