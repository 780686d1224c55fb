"""Calls of Ray's actors: their arguments, answers, and the translation of Ray's errors into gerl's."""

import re
from collections.abc import Sequence
from typing import Any

import ray

from gerl.cluster.environments import failure
from gerl.cluster.health import AGAIN
from gerl.errors import ClusterError, GerlError, WorkerDied

FRAMES = 8  # shown frames of a worker's traceback


def fetch(worker: str, reference: Any) -> Any:
    """Return the result of an ended call of `worker`; raises its exception, or a `ClusterError` if it is lost."""
    try:
        return ray.get(reference)
    except ray.exceptions.RayError as error:
        raised = _translated(worker, error)
        # the debug log has the remote traceback; unexpected errors have it in a note
        raise raised from (error if isinstance(raised, GerlError) else None)


def fetch_all(references: Sequence[Any]) -> list[Any]:
    """Return the results of ended calls in one request, which is faster; raises Ray's own exceptions."""
    return list(ray.get(list(references)))


def wait(references: Sequence[Any], count: int, timeout: float | None) -> list[Any]:
    """Wait until `count` calls have ended or `timeout` seconds have passed; return the ended ones."""
    return list(ray.wait(list(references), num_returns=count, timeout=timeout, fetch_local=False)[0])


def put(argument: object) -> Any:
    """Put an argument of several calls into Ray's store. Raises `ClusterError` if the store is full or Ray is lost."""
    try:
        return ray.put(argument)
    except ray.exceptions.RayError as error:
        raise _lost("Ray's store", error) from error


def _translated(worker: str, error: ray.exceptions.RayError) -> Exception:
    if not isinstance(error, ray.exceptions.RayTaskError) or isinstance(error, ray.exceptions.RayActorError):
        return _lost(worker, error)
    cause = error.cause
    if not isinstance(cause, Exception) or isinstance(cause, ray.exceptions.RayError):
        return error
    if not isinstance(cause, GerlError):
        lines = str(error).rstrip().splitlines()  # the remote traceback
        frames = [i for i, line in enumerate(lines) if line.lstrip().startswith('File "')]
        last = lines[frames[-FRAMES:][0] :] if frames else lines[-FRAMES:]
        cause.add_note("\n".join([f"in {worker}:", *last]))
    return cause


def _lost(worker: str, error: ray.exceptions.RayError) -> ClusterError:
    # the first clause of Ray's message: the rest is ids, hints for developers and RPC errors
    text = re.sub(r"\s?\b[0-9a-f]{16,}\b", "", str(error).strip().removeprefix("System error: "))
    clause = re.split(r"\n|[.;:](?:\s|$)", text, maxsplit=1)[0].strip()
    reason, again = ": ".join(filter(None, (type(error).__name__, clause))), AGAIN
    match error:
        case ray.exceptions.OutOfMemoryError():
            return WorkerDied(
                f"Ray killed {worker}, because the machine was nearly out of memory ({reason}): lower "
                f"cluster.num_workers, rollout.micro_batch_size or reward.scorers.NAME.replicas, then {again}"
            )
        case ray.exceptions.ObjectStoreFullError():
            return ClusterError(
                f"Ray's object store has no room for the images of {worker} ({reason}): lower "
                "rollout.micro_batch_size and validation.micro_batch_size, or give /dev/shm more space, then "
                f"{again}"
            )
        case ray.exceptions.OutOfDiskError():
            return ClusterError(f"the disk with Ray's session folder is full ({reason}): free space, then {again}")
        case ray.exceptions.RuntimeEnvSetupError():
            return ClusterError(failure(worker, str(error)))
        case ray.exceptions.RayActorError():  # also raised if the call only depends on a call of a dead worker
            killed = "; the system kills processes silently when memory runs out" if "OOM" in str(error) else ""
            return WorkerDied(f"{worker} died ({reason}{killed}): its log is in Ray's session folder; {again}")
        case ray.exceptions.ObjectLostError() | ray.exceptions.NodeDiedError():  # its machine is gone
            return WorkerDied(f"the answer of {worker} was lost with its machine ({reason}): {again}")
        case _:
            return ClusterError(f"Ray lost the answer of {worker} ({reason}): {again}")
