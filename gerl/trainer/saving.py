"""The checkpoint of a run that trains weights themselves: written by those who hold them, complete or absent."""

import shutil
from pathlib import Path

from gerl.cluster import WorkerGroup
from gerl.config import Config
from gerl.errors import CheckpointError
from gerl.workers.hybrid import HybridWorker
from gerl.workers.whole import FROZEN, STATE


def writers(config: Config, process: int) -> list[int]:
    """The processes that have a checkpoint together: the ranks of a worker, that of `process`, or this one alone."""
    if not config.lockstep:
        return [process]
    ranks = config.cluster.ranks_per_worker
    first = process - process % ranks
    return list(range(first, first + ranks))


def fill(workers: WorkerGroup[HybridWorker], members: list[int], step: int, folder: Path) -> None:
    """Let the processes `members` write the checkpoint of `step` into `folder`.

    Raises `CheckpointError` if one cannot, or has no such folder.
    """
    place = folder.resolve()
    try:
        pending = [
            workers.submit(process, HybridWorker.write_state, step, place, number)
            for number, process in enumerate(members)
        ]
        for call in pending:
            call.result()
        found = len(list((place / STATE).glob("*.safetensors")))
        if found != len(members):
            raise CheckpointError(
                f"{len(members)} processes wrote a checkpoint, of which {found} are in {folder.parent}: use a run "
                "folder (hydra.run.dir) that all machines share"
            )
        workers.submit(members[0], HybridWorker.write_denoisers, place).result()
    finally:
        shutil.rmtree(place / FROZEN, ignore_errors=True)
