"""Write checkpoints: a LoRA's at once, those of full fine-tuning beside the training by the processes that hold them.

A checkpoint is complete or absent. A step of full fine-tuning pays for a copy of the state in main memory.
"""

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from gerl.cluster import WorkerGroup
from gerl.config import Config
from gerl.errors import CheckpointError
from gerl.run.checkpoint import FROZEN, PARTS, WorkerState
from gerl.workers.worker import PolicyWorker

POLL_S = 0.05  # between questions whether a file is written


@dataclass(frozen=True)
class Held:
    """The state of a finished step, from which a checkpoint is written.

    `write`: writes its files into a folder. `check`: raises `ClusterError` if those who write hang. `at_once`: writing
    waits for no process.
    """

    numbers: WorkerState
    write: Callable[[Path], None]
    check: Callable[[], object] = bool
    at_once: bool = True

    @classmethod
    def of(cls, files: Mapping[str, bytes], numbers: WorkerState) -> "Held":
        """The state of a LoRA, whose files are here."""

        def write(folder: Path) -> None:
            for name, content in files.items():
                (folder / name).parent.mkdir(exist_ok=True)
                (folder / name).write_bytes(content)

        return cls(numbers, write)


class CheckpointWriter:
    """Writes checkpoints in a thread, one after the other."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "checkpoint")
        self._last: Future[None] | None = None
        self._check: Callable[[], object] = bool
        self._every: float | None = None

    def start(self, write: Callable[[], None], check: Callable[[], object], every: float | None) -> None:
        """Begin to write a checkpoint, after the one before it, which may raise here what `finish` raises.

        `check` raises `ClusterError` if those who write it hang; who waits calls it `every` so many seconds.
        """
        self.finish()
        self._last, self._check, self._every = self._executor.submit(write), check, every

    def poll(self) -> None:
        """Raise `CheckpointError` if a checkpoint could not be written, without waiting for one that is not ready."""
        if self._last is not None and self._last.done():
            self.finish()

    def finish(self) -> None:
        """Wait for what was begun; raises `CheckpointError` once if it cannot be written, and what `check` raises."""
        last, self._last = self._last, None
        if last is not None:
            while not wait([last], self._every).done:
                self._check()
            last.result()


def writers(config: Config, process: int) -> list[int]:
    """The processes that write a checkpoint together: the ranks of a worker, that of `process`, or this one alone."""
    if not config.lockstep:
        return [process]
    ranks = config.cluster.ranks_per_worker
    first = process - process % ranks
    return list(range(first, first + ranks))


def hold_parts(workers: WorkerGroup[PolicyWorker], members: Sequence[int], step: int) -> Held:
    """Let processes keep their parts of the state after `step`, and train while these are written."""
    from gerl.workers.state import hold_state, start_denoisers, start_state, written  # these import diffusers

    pending = [workers.submit(process, hold_state, step) for process in members]
    numbers = [call.result() for call in pending]

    def wait_until_written(processes: Sequence[int]) -> None:
        for process in processes:
            while True:
                call = workers.submit(process, written)
                call.wait()  # for however long: the steps that it trains meanwhile come first
                if call.ended():
                    break
                time.sleep(POLL_S)

    def write(folder: Path) -> None:
        place = folder.resolve()
        try:
            for number, process in enumerate(members):
                workers.submit(process, start_state, place, number)
            wait_until_written(members)
            found = len(list((place / PARTS).glob("*.safetensors")))
            if found != len(members):
                raise CheckpointError(
                    f"{len(members)} processes wrote a checkpoint, of which {found} are in {folder.parent}: use a run "
                    "folder (hydra.run.dir) shared by all machines"
                )
            workers.submit(members[0], start_denoisers, place)
            wait_until_written(members[:1])
        finally:
            shutil.rmtree(place / FROZEN, ignore_errors=True)

    def check() -> None:
        for call in [workers.submit(process, written) for process in members]:
            call.result()

    return Held(numbers[0], write, check, at_once=False)
