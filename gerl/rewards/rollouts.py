"""Sampling and scoring at once: scorers score a micro-batch while the workers sample the next ones."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from gerl.cluster import Pending, silence
from gerl.protocol import Images, RolloutTask, Sample, Scores
from gerl.rewards.manager import RewardManager

POLL_S = 0.1  # interval at which the thread checks whether the block has ended
PREFETCH = 2  # micro-batches submitted to a process: the current one and the next


class Dispatch:
    """Micro-batches being sampled, each by its process of `processes` `[M]`."""

    def __init__(self, call: Callable[[int], Pending[Images]], processes: Sequence[int]) -> None:
        self.submit, self.processes = call, processes

    def ended(self, number: int) -> None:
        """Handle the end of a micro-batch."""

    def finish(self) -> Sequence[RolloutTask]:
        """Handle the end of all micro-batches; return the tasks that will be trained on."""
        return []


class RoundRobin(Dispatch):
    """Micro-batches that `count` processes take in turn: `call(i)` submits the i-th of `total`."""

    def __init__(self, call: Callable[[int], Pending[Images]], count: int, total: int) -> None:
        super().__init__(call, [number % count for number in range(total)])


class PendingRollout:
    """Micro-batches in flight; sampling pauses while the scorers lag behind, so that images do not accumulate."""

    def __init__(
        self,
        manager: RewardManager,
        samples: Sequence[Sequence[Sample]],
        dispatch: Dispatch,
        hang_after: float | None = None,
        ahead: int = 0,
        held_out: bool = False,
        progress: Callable[[int], None] = lambda images: None,
        scored: bool = True,
    ) -> None:
        """`hang_after`: seconds without an answer after which a worker counts as dead.

        `ahead`: steps between sampling and training; more images may wait for the scorers.
        `held_out`: votes of people are not requested. `progress`: called with the number of sampled images.
        `scored`: whether any scorer gets the images.
        """
        self.hang_after, self.silent, self.progressed = hang_after, 0.0, progress
        self.what: Literal["sample", "validate"] = "validate" if held_out else "sample"
        self.manager, self.dispatch, self.count = manager, dispatch, len(samples)
        self.processes = dispatch.processes
        self.sizes = [len(batch) for batch in samples]
        self.total = sum(self.sizes)
        self.scoring = manager.open(samples, held_out, scored)
        self.scorers = list(self.scoring.scorers)
        self.images: list[Pending[Images]] = []  # of the submitted micro-batches, in order
        self.running: dict[int, Pending[Images]] = {}  # those not yet sampled
        self.busy = Counter[int]()  # submitted micro-batches by process
        self.sampled: set[int] = set()
        # so that scorers always have a micro-batch
        self.limit = (1 + ahead) * (len(set(self.processes)) + manager.capacity)

    def wait_until_sampled(self, others: Sequence["PendingRollout"] = ()) -> None:
        """Wait until all images are sampled, serving later rollouts `others`; raises errors of sampling and scoring."""
        while len(self.sampled) < self.count:
            advance([self, *others])

    def finish(
        self, others: Sequence["PendingRollout"] = (), meanwhile: Callable[[], None] | None = None
    ) -> list[Scores]:
        """Wait for all micro-batches and return their scores in order; raises errors of sampling and scoring.

        `meanwhile`: called while scores are missing, after each wait.
        """
        self.wait_until_sampled(others)
        while self.scoring.left:
            if meanwhile is not None:
                meanwhile()
            advance([self, *others])
        return self.scoring.scores()

    def progress(self) -> str:
        """Describe how many images are sampled and which scorers are pending; called from another thread."""
        sampled = sum(self.sizes[i] for i in tuple(self.sampled))
        if sampled < self.total:
            return f"{sampled} of {self.total} images sampled"
        return f"all {self.total} images sampled, waiting for {' and '.join(self.scorers)}"

    def submit(self) -> None:
        """Submit the micro-batches for which a sampler is free."""
        while len(self.images) < self.count and self.scoring.queued < self.limit:
            i = len(self.images)
            if self.busy[self.processes[i]] >= PREFETCH:
                break
            started = time.perf_counter()
            self.running[i] = image = self.dispatch.submit(i)
            self.images.append(image)
            self.busy[self.processes[i]] += 1
            self.manager.timeline.submitted(image, self.what, started)

    def take(self, ended: Collection[Pending[Any]]) -> None:
        """Pass the images of finished calls `ended` to the scorers."""
        for i, image in [(i, image) for i, image in self.running.items() if image in ended]:
            del self.running[i]
            self.busy[self.processes[i]] -= 1
            self.sampled.add(i)
            self.scoring.add(i, image)
            self.dispatch.ended(i)
            self.progressed(self.sizes[i])

    def check_silence(self, heard: bool, seconds: float) -> None:
        """Count `seconds` without an answer, unless one was `heard`; raises `WorkerDied` after `hang_after`."""
        self.silent = 0.0 if heard or not self.running else self.silent + seconds
        if self.hang_after is not None and self.silent >= self.hang_after:
            raise silence(list(self.running.values()), self.hang_after)


def advance(rollouts: Sequence[PendingRollout], most: float | None = None) -> None:
    """Submit due calls, wait up to `most` seconds for one to finish, and take its result.

    `rollouts`: of one manager, at least one of them unfinished; each begins once those before it are submitted.
    """
    manager = rollouts[0].manager
    for each in rollouts:
        each.submit()
        if len(each.images) < each.count:
            break
    sampling = [image for each in rollouts for image in each.running.values()]
    limits = [limit for limit in (most, *(each.hang_after for each in rollouts if each.running)) if limit is not None]
    started = time.monotonic()
    ended = manager.serve(sampling, min(limits, default=None))
    heard = not ended.isdisjoint(sampling) if manager.feedback_queue else bool(ended)  # people vote at any time
    for each in rollouts:
        each.check_silence(heard, time.monotonic() - started)
        each.take(ended)


@contextmanager
def serve_in_background(manager: RewardManager, rollouts: Sequence[PendingRollout]) -> Iterator[None]:
    """Keep samplers and scorers busy with `rollouts` from a thread; the next wait for a rollout raises its errors."""
    if not manager.remote:  # in one process they would compete with the block
        yield
        return
    over = threading.Event()

    def left() -> bool:
        return any(each.scoring.left or len(each.sampled) < each.count for each in rollouts)

    def serve() -> None:
        try:
            while not over.is_set() and left():
                advance(rollouts, POLL_S)
        except Exception as error:  # noqa: BLE001 - raised by the next wait
            manager.failure = error

    server = threading.Thread(target=serve, name="sampling ahead", daemon=True)
    server.start()
    try:
        yield
    finally:
        over.set()
        server.join()
