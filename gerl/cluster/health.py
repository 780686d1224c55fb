"""Checks that Ray's services are alive, by their sockets; Ray itself is not needed."""

import contextlib
import socket
import time
from collections.abc import Iterator

from gerl.errors import RayDied

CONTROL, NODE = "Ray's control service (GCS)", "Ray's node service (raylet)"
EVERY = 2.0  # seconds between probes of another machine
OWN = 0.2  # and of this machine
AGAIN = "restart the command"  # remedy, as the end of a sentence
PATIENCE = 30.0  # seconds given to a joined cluster to restart its control service; its workers end after 60 without it


class Health:
    """Probe of `services` (name -> (host, port)); only the control service may be silent for `patience` seconds."""

    def __init__(self, services: dict[str, tuple[str, int]], patience: float, every: float = OWN) -> None:
        self.services, self.patience, self.every = services, patience, every
        self._looked = -every
        self._refused: dict[str, float] = {}  # start of its silence

    def check(self, now: bool = False) -> None:
        """Raise `RayDied` if a service is gone; probes at most every `every` seconds, or `now`."""
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


_watched: Health | None = None  # a process has a single Ray session


def check(now: bool = False) -> None:
    """Raise `RayDied` if a service of this process's Ray session is gone; probes every few seconds, or `now`."""
    if _watched is not None:
        _watched.check(now)


def lives() -> bool:
    """Whether Ray answers now; calls to an unresponsive Ray would wait forever."""
    return _watched is None or not any(_refuses(*place) for place in _watched.services.values())


@contextlib.contextmanager
def rescuing() -> Iterator[None]:
    """Exclude the control service from `check` in the block: workers outlive it long enough to be saved from."""
    global _watched
    before = _watched
    if before is not None:
        _watched = Health(
            {name: place for name, place in before.services.items() if name != CONTROL}, 0.0, before.every
        )
    try:
        yield
    finally:
        _watched = before


@contextlib.contextmanager
def watched(services: dict[str, tuple[str, int]], own: bool) -> Iterator[None]:
    """Let `check` in the block probe the `services` of the Ray that this process started (`own`) or joined."""
    global _watched
    _watched = Health(services, 0.0) if own else Health(services, PATIENCE, EVERY)
    try:
        yield
    finally:
        _watched = None


def _refuses(host: str, port: int) -> bool:
    """Whether the connection is refused; a timeout (slow or distant machine) does not count."""
    try:
        socket.create_connection((host, port), timeout=2).close()
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
    return False
