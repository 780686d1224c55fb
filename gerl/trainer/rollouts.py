"""Draw and score: the workers draw micro-batches, the scorers look at each while the next ones are drawn."""

import time
from collections.abc import Callable, Sequence

from gerl.cluster import Pending, silence, wait_any
from gerl.protocol import Images, Scores
from gerl.rewards.manager import RewardManager, Scorable

AHEAD = 2  # micro-batches submitted to a process: the one it draws and the next


class Rollouts:
    """Micro-batches of `samples` on their way: `draw(i)` submits the i-th, to process `owners[i]`.

    Where the scorers do not keep up, drawing pauses, so that images do not pile up.
    """

    def __init__(
        self,
        manager: RewardManager,
        samples: Sequence[Sequence[Scorable]],
        draw: Callable[[int], Pending[Images]],
        owners: Sequence[int],
        hang_after: float | None = None,
        ahead: int = 0,
    ) -> None:
        """`hang_after`: seconds without an answer of the workers after which they count as dead.

        `ahead`: steps that these images are drawn before they are trained on, so that more of them may wait.
        """
        self.hang_after, self.silent = hang_after, 0.0
        self.manager, self.draw, self.owners, self.count = manager, draw, owners, len(samples)
        self.sizes = [len(batch) for batch in samples]
        self.scorers = list(manager.config.scorers)
        self.scoring = manager.open(samples)
        self.images: list[Pending[Images]] = []  # of the micro-batches submitted so far, in order
        self.drawn: set[int] = set()
        self.limit = (1 + ahead) * (len(set(owners)) + manager.capacity)  # something is always there to be scored

    def wait_until_drawn(self) -> None:
        """Return when all images are drawn; raises what drawing and scoring raise."""
        while len(self.drawn) < self.count:
            self.advance()

    def finish(self) -> list[Scores]:
        """The scores of all micro-batches, in order; raises what drawing and scoring raise."""
        self.wait_until_drawn()
        return self.scoring.finish()

    def progress(self) -> str:
        """In words, how many images are drawn, and which scorers are waited for; for another thread."""
        drawn, total = sum(self.sizes[i] for i in tuple(self.drawn)), sum(self.sizes)
        if drawn < total:
            return f"{drawn} of {total} images are drawn"
        return f"all {total} images are drawn, waiting for {' and '.join(self.scorers)}"

    def advance(self) -> None:
        """Submit what can be, wait until something has ended, and deal with it."""
        self._submit()
        self.manager.submit()
        drawing = [image for i, image in enumerate(self.images) if i not in self.drawn]
        awaited, seconds = self.manager.awaited()
        limits = [limit for limit in (seconds, self.hang_after if drawing else None) if limit is not None]
        started = time.monotonic()
        ended = set(wait_any([*drawing, *awaited], min(limits, default=None)))
        if not ended and drawing and self.hang_after is not None:
            self.silent += time.monotonic() - started
            if self.silent >= self.hang_after:
                raise silence(drawing, self.hang_after)
        else:
            self.silent = 0.0
        for i, image in enumerate(self.images):
            if i not in self.drawn and image in ended:
                self.drawn.add(i)
                self.scoring.add(i, image)
        self.manager.collect(ended)

    def _submit(self) -> None:
        while len(self.images) < self.count and self.scoring.queued < self.limit:
            i = len(self.images)
            if len([k for k in range(i) if self.owners[k] == self.owners[i] and k not in self.drawn]) >= AHEAD:
                break
            self.images.append(self.draw(i))
