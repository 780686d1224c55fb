"""Whether Ray itself lives: without its services a run stands still, and after a minute ends without a word."""

import contextlib
import socket
import time
from collections.abc import Iterator

import ray

from gerl.errors import RayDied

CONTROL, NODE = "Ray's control service (GCS)", "Ray's node service (raylet)"
EVERY = 2.0  # seconds between two looks at another machine
OWN = 0.2  # and at this one
PATIENCE = 30.0  # seconds for a joined cluster to restart its control service; its workers end after 60 without it


class Health:
    """Looks whether the `services` answer, name -> (host, port); only the control service is given some `patience`."""

    def __init__(self, services: dict[str, tuple[str, int]], patience: float, every: float = OWN) -> None:
        self.services, self.patience, self.every = services, patience, every
        self._looked = -every
        self._refused: dict[str, float] = {}  # since when

    def check(self, now: bool = False) -> None:
        """Raise `RayDied` if a service is gone; looks `every` few seconds, however often it is called, or `now`."""
        moment = time.monotonic()
        if not now and moment < self._looked + self.every:
            return
        self._looked = moment
        for name, (host, port) in self.services.items():
            if not _refuses(host, port):
                self._refused.pop(name, None)
            elif moment - self._refused.setdefault(name, moment) >= (self.patience if name == CONTROL else 0.0):
                raise RayDied(
                    f"{name} at {host}:{port} is gone, without which Ray cannot run: see the log in its session folder"
                )


_watched: Health | None = None  # a process has one session of Ray


def check(now: bool = False) -> None:
    """Raise `RayDied` if the session of Ray that this process has is about to end; looks every few seconds, or `now`.

    That is before the store is used: without it Ray ends this process without a word.
    """
    if _watched is not None:
        _watched.check(now)


def lives() -> bool:
    """Whether Ray answers at this moment; where it does not, much of what it is asked for is waited for in vain."""
    return _watched is None or not any(_refuses(*place) for place in _watched.services.values())


@contextlib.contextmanager
def rescuing() -> Iterator[None]:
    """A block in which workers are asked for what they have, and `check` looks at the services that take them along.

    Without the control service they live on for a while.
    """
    global _watched
    kept = _watched
    if kept is not None:
        _watched = Health({name: place for name, place in kept.services.items() if name != CONTROL}, 0.0, kept.every)
    try:
        yield
    finally:
        _watched = kept


@contextlib.contextmanager
def watched(own: bool) -> Iterator[None]:
    """A block in which `check` looks at the Ray that this process started (`own`) or joined."""
    global _watched
    host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
    services = {CONTROL: (host.strip("[]"), int(port))}
    here = ray.get_runtime_context().get_node_id()
    (node,) = (node for node in ray.nodes() if node["NodeID"] == here)
    services[NODE] = node["NodeManagerAddress"], node["NodeManagerPort"]
    _watched = Health(services, 0.0) if own else Health(services, PATIENCE, EVERY)
    try:
        yield
    finally:
        _watched = None


def _refuses(host: str, port: int) -> bool:
    """Whether nothing listens there; a machine that is slow or far away is something else."""
    try:
        socket.create_connection((host, port), timeout=2).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False
