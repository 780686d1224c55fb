"""Draw and score: the workers draw micro-batches, the scorers look at each while the next ones are drawn."""

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Literal

from gerl.cluster import Pending, silence
from gerl.protocol import Images, Scores
from gerl.rewards.asking import Scorable, wait
from gerl.rewards.manager import RewardManager

MOMENT = 0.1  # seconds after which it is seen that nothing is to be done meanwhile any more
AHEAD = 2  # micro-batches submitted to a process: the one it draws and the next


class Rollouts:
    """Micro-batches of `samples` on their way: `draw(i)` submits the i-th, to process `owners[i]`.

    `done(i)` is called when it is drawn. Where the scorers do not keep up, drawing pauses, so that images do not pile
    up.
    """

    def __init__(
        self,
        manager: RewardManager,
        samples: Sequence[Sequence[Scorable]],
        draw: Callable[[int], Pending[Images]],
        owners: Sequence[int],
        hang_after: float | None = None,
        ahead: int = 0,
        done: Callable[[int], None] = lambda _: None,
        held_out: bool = False,
    ) -> None:
        """`hang_after`: seconds without an answer of the workers after which they count as dead.

        `ahead`: steps that these images are drawn before they are trained on, so that more of them may wait.
        `held_out`: people are not asked about them.
        """
        self.hang_after, self.silent, self.done = hang_after, 0.0, done
        self.what: Literal["draw", "validate"] = "validate" if held_out else "draw"
        self.manager, self.draw, self.owners, self.count = manager, draw, owners, len(samples)
        self.sizes = [len(batch) for batch in samples]
        self.total = sum(self.sizes)
        self.scoring = manager.open(samples, held_out)
        self.scorers = list(self.scoring.scorers)
        self.images: list[Pending[Images]] = []  # of the micro-batches submitted so far, in order
        self.under_way: dict[int, Pending[Images]] = {}  # of those that are not yet drawn
        self.busy = Counter[int]()  # by process: how many of them it has
        self.drawn: set[int] = set()
        self.limit = (1 + ahead) * (len(set(owners)) + manager.capacity)  # something is always there to be scored

    def wait_until_drawn(self, others: Sequence["Rollouts"] = ()) -> None:
        """Return when all images are drawn; `others` that come after them go on meanwhile.

        Raises what drawing and scoring raise.
        """
        while len(self.drawn) < self.count:
            advance([self, *others])

    def finish(self, others: Sequence["Rollouts"] = ()) -> list[Scores]:
        """The scores of all micro-batches, in order; raises what drawing and scoring raise."""
        self.wait_until_drawn(others)
        while self.scoring.left:
            advance([self, *others])
        return self.scoring.scores()

    def progress(self) -> str:
        """In words, how many images are drawn, and which scorers are waited for; for another thread."""
        drawn = sum(self.sizes[i] for i in tuple(self.drawn))
        if drawn < self.total:
            return f"{drawn} of {self.total} images sampled"
        return f"all {self.total} images sampled, waiting for {' and '.join(self.scorers)}"

    @property
    def drawing(self) -> list[Pending[Images]]:
        """The micro-batches that are submitted and not yet drawn."""
        return list(self.under_way.values())

    def submit(self) -> None:
        """Submit the micro-batches of which it is time."""
        while len(self.images) < self.count and self.scoring.queued < self.limit:
            i = len(self.images)
            if self.busy[self.owners[i]] >= AHEAD:
                break
            started = self.manager.timeline.now()
            self.under_way[i] = image = self.draw(i)
            self.images.append(image)
            self.busy[self.owners[i]] += 1
            self.manager.timeline.submitted(image, self.what, started)

    def take(self, ended: Collection[Pending[Any]]) -> None:
        """Give the scorers what has `ended`."""
        self.manager.timeline.ended(ended)
        for i, image in [(i, image) for i, image in self.under_way.items() if image in ended]:
            del self.under_way[i]
            self.busy[self.owners[i]] -= 1
            self.drawn.add(i)
            self.scoring.add(i, image)
            self.done(i)

    def check_silence(self, heard: bool, seconds: float) -> None:
        """Raise `WorkerDied` if after `seconds` more the workers that draw have not been `heard` of for too long."""
        self.silent = 0.0 if heard or not self.drawing else self.silent + seconds
        if self.hang_after is not None and self.silent >= self.hang_after:
            raise silence(self.drawing, self.hang_after)


def advance(rollouts: Sequence[Rollouts], most: float | None = None) -> None:
    """Submit what can be, wait until something has ended, or for at most so many seconds, and deal with it.

    `rollouts`: of one manager, with at least one whose images are not all drawn and scored; each begins when those
    before it are submitted.
    """
    manager = rollouts[0].manager
    for each in rollouts:
        each.submit()
        if len(each.images) < each.count:
            break
    manager.submit()
    drawing = [image for each in rollouts for image in each.drawing]
    awaited, seconds = manager.awaited()
    hang_after = [each.hang_after for each in rollouts if each.drawing]
    limits = [limit for limit in (seconds, most, *hang_after) if limit is not None]
    started = time.monotonic()
    ended = wait([*drawing, *awaited], min(limits, default=None))
    heard = not ended.isdisjoint(drawing) if manager.asleep else bool(ended)  # people are asked all the time
    for each in rollouts:
        each.check_silence(heard, time.monotonic() - started)
    for each in rollouts:
        each.take(ended)
    manager.collect(ended)


@contextlib.contextmanager
def meanwhile(manager: RewardManager, rollouts: Sequence[Rollouts]) -> Iterator[None]:
    """A block that waits for something else; workers that only draw, and scorers, are given what waits for them.

    What is raised by that in it, the next that waits for them raises.
    """
    if not rollouts or not manager.remote:  # in process they would be in the way
        yield
        return
    over = threading.Event()

    def left() -> bool:
        return any(each.scoring.left or len(each.drawn) < each.count for each in rollouts)

    def serve() -> None:
        try:
            while not over.is_set() and left():
                advance(rollouts, MOMENT)
        except Exception as error:  # noqa: BLE001 - raised by whoever waits
            manager.failure = error

    server = threading.Thread(target=serve, name="sampling meanwhile", daemon=True)
    server.start()
    try:
        yield
    finally:
        over.set()
        server.join()
