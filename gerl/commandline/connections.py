"""HTTP connections of the servers of gerl: whoever opens one and asks for nothing must not keep others out."""

import asyncio
import contextlib
import resource
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD = 20.0  # seconds for the head of a request to arrive
MOST = 1000  # connections at a time
SPARE = 64  # files that a server needs besides


def most() -> int:
    """Connections that are kept open at a time: as many as the process may have files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST if soft == resource.RLIM_INFINITY else max(8, min(MOST, soft - SPARE))


class Connection(H11Protocol):
    """Closes a connection on which no request arrives in time, and one of too many, that which has waited longest.

    For `uvicorn.Config(http=Connection)`.
    """

    late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._expect_head()
        if len(self.connections) > most():
            waiting = [other for other in self.connections if isinstance(other, Connection) and other.late is not None]
            min(waiting, key=lambda other: other.late.when() if other.late else 0.0)._close()

    def data_received(self, data: bytes) -> None:
        if self.late is None and (self.cycle is None or self.cycle.response_complete):
            self._expect_head()
        cycle = self.cycle
        super().data_received(data)
        if self.cycle is not cycle:  # the head is there
            self._has_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._has_head()
        super().connection_lost(exc)

    def _expect_head(self) -> None:
        self.late = self.loop.call_later(HEAD, self._close)

    def _has_head(self) -> None:
        if self.late is not None:
            self.late.cancel()
            self.late = None

    def _close(self) -> None:
        self._has_head()
        with contextlib.suppress(OSError):
            self.transport.abort()
