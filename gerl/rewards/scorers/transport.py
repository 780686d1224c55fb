"""Connections whose whole exchange, from the first byte sent to the last one read, ends at a deadline.

The time-outs of requests and sockets are for each piece: a service that sends a byte now and then never exceeds them.
"""

import contextlib
import socket
import threading
from typing import Any, Self

from requests.adapters import HTTPAdapter
from urllib3 import PoolManager
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

_OF_THREAD = threading.local()  # its `deadline`, if there is one: an exchange runs in one thread from begin to end


class Deadline:
    """Within this context the connection that this thread uses is ended `seconds` after it began.

    `passed` says whether that happened: whoever was reading sees a connection that the other side seems to have closed.
    """

    def __init__(self, seconds: float) -> None:
        self.passed = False
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True

    def __enter__(self) -> Self:
        _OF_THREAD.deadline = self
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        _OF_THREAD.deadline = None

    def hold(self, connected: socket.socket | None) -> None:
        """Watch this socket: http.client forgets its own where the answer ends with the connection."""
        with self._lock:
            self._socket = connected
            if self.passed:
                self._shut()

    def _end(self) -> None:
        with self._lock:
            self.passed = True
            self._shut()

    def _shut(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):  # it is closed already
                # Not the method of an SSLSocket, which would drop what the reading thread is using.
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)


class WatchedAdapter(HTTPAdapter):
    """Connections of requests, to a service or its proxy, that a `Deadline` of the thread can end."""

    def init_poolmanager(self, *arguments: Any, **options: Any) -> None:
        super().init_poolmanager(*arguments, **options)
        _watch(self.poolmanager)

    def proxy_manager_for(self, proxy: str, **options: Any) -> PoolManager:
        manager: PoolManager = super().proxy_manager_for(proxy, **options)
        _watch(manager)
        return manager


class _Watched(HTTPConnection):
    def connect(self) -> None:
        super().connect()
        self._hold()

    def request(self, *arguments: Any, **options: Any) -> None:
        self._hold()  # one that was kept open is not connected again
        super().request(*arguments, **options)

    def _hold(self) -> None:
        deadline: Deadline | None = getattr(_OF_THREAD, "deadline", None)
        if deadline is not None and self.sock is not None:
            deadline.hold(self.sock)


class _WatchedTLS(_Watched, HTTPSConnection):
    pass


class _Pool(HTTPConnectionPool):
    ConnectionCls = _Watched


class _PoolTLS(HTTPSConnectionPool):
    ConnectionCls = _WatchedTLS


def _watch(manager: PoolManager) -> None:
    manager.pool_classes_by_scheme = {"http": _Pool, "https": _PoolTLS}
