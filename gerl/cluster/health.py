"""Whether Ray itself lives: without its services a run stands still, and after a minute ends without a word."""

import contextlib
import socket
import time
from collections.abc import Iterator

import ray

from gerl.errors import RayDied

EVERY = 2.0  # seconds between two looks
PATIENCE = 30.0  # seconds for a joined cluster to restart its control service; its workers end after 60 without it


class Health:
    """Looks whether the `services` answer, name -> (host, port), and gives those that do not some `patience`."""

    def __init__(self, services: dict[str, tuple[str, int]], patience: float) -> None:
        self.services, self.patience = services, patience
        self._looked = time.monotonic()
        self._refused: dict[str, float] = {}  # since when

    def check(self) -> None:
        """Raise `RayDied` if a service is gone; looks every few seconds, however often it is called."""
        now = time.monotonic()
        if now < self._looked + EVERY:
            return
        self._looked = now
        for name, (host, port) in self.services.items():
            if not _refuses(host, port):
                self._refused.pop(name, None)
            elif now - self._refused.setdefault(name, now) >= self.patience:
                raise RayDied(
                    f"{name} at {host}:{port} is gone, without which Ray ends: its session folder has the log"
                )


_watched: Health | None = None  # a process has one session of Ray


def check() -> None:
    """Raise `RayDied`, once, if the session of Ray that this process has is about to end.

    Workers may live on for a while, and be asked for what they have.
    """
    global _watched
    try:
        if _watched is not None:
            _watched.check()
    except RayDied:
        _watched = None
        raise


@contextlib.contextmanager
def watched(own: bool) -> Iterator[None]:
    """A block in which `check` looks at the Ray that this process started (`own`) or joined."""
    global _watched
    host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
    services = {"Ray's control service (GCS)": (host.strip("[]"), int(port))}
    if own:
        (node,) = ray.nodes()
        services["Ray's node service (raylet)"] = (node["NodeManagerAddress"], node["NodeManagerPort"])
    _watched = Health(services, 0.0 if own else PATIENCE)
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
