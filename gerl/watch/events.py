"""Tells pages what has changed: one thread looks at the files of a run, for however many pages."""

import asyncio
import threading
from collections.abc import AsyncIterator

from gerl.run.page import RunData

PAUSE = 0.5  # seconds between looks
ALIVE = 15.0  # seconds after which a stream without news has a line all the same: who reads it may be gone


class Subscriber:
    """A page that waits for news."""

    def __init__(self) -> None:
        self._loop, self._news = asyncio.get_running_loop(), asyncio.Event()

    def wake(self) -> None:
        """There are news; called by any thread."""
        self._loop.call_soon_threadsafe(self._news.set)

    async def wait(self, seconds: float) -> bool:
        """Wait for news, for at most so many seconds; whether there are any."""
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            return False
        self._news.clear()
        return True


class Watcher:
    """Looks at a run while there are pages that want to know."""

    def __init__(self, run: RunData) -> None:
        self.run = run
        self.signatures: dict[str, str] = {}
        self.subscribers: set[Subscriber] = set()
        self._lock = threading.Lock()
        self._over: threading.Event | None = None

    async def changes(self, closing: threading.Event) -> AsyncIterator[dict[str, str] | None]:
        """The signatures of all parts of the run now, and whenever one has changed; None from time to time."""
        subscriber = Subscriber()
        self._add(subscriber)
        sent: dict[str, str] = {}
        try:
            while not closing.is_set():
                if self.signatures != sent:
                    sent = dict(self.signatures)
                    yield sent
                elif not await subscriber.wait(ALIVE):
                    yield None
        finally:
            self._remove(subscriber)

    def wake(self) -> None:
        """Let all pages look, at the end of the server for instance."""
        for subscriber in list(self.subscribers):
            subscriber.wake()

    def _add(self, subscriber: Subscriber) -> None:
        with self._lock:
            self.subscribers.add(subscriber)
            if self._over is None:
                self.signatures = self.run.signatures()
                self._over = threading.Event()
                threading.Thread(target=self._look, args=[self._over], name="watcher", daemon=True).start()

    def _remove(self, subscriber: Subscriber) -> None:
        with self._lock:
            self.subscribers.discard(subscriber)
            if not self.subscribers and self._over is not None:
                self._over.set()
                self._over = None

    def _look(self, over: threading.Event) -> None:
        while not over.wait(PAUSE):
            now = self.run.signatures()
            if now != self.signatures:
                self.signatures = now
                self.wake()
