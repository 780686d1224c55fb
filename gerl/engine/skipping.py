"""Rollouts that skip denoising steps: compression (MixGRPO-Flash), and recordings of a call's structure.

A skipped step leaves the latents unchanged and does not use the denoiser's output: the call is answered with the
previous step's output, which has the right shape.
"""

import math
from collections.abc import Callable
from itertools import pairwise

from gerl.engine.tape import ComponentCall, Tape
from gerl.engine.transitions import ONE_STEP, Span
from gerl.errors import ModelError


class Skipping:
    """Policy for skipping steps; this base class skips none."""

    last: int | None = None  # leave the pipeline after this number of steps

    def begin(self, count_steps: Callable[[], int]) -> None:
        """Initialise before the pipeline's first step."""

    def span(self, step: int) -> Span:
        """Return start and end of step `step`, in scheduler steps relative to it."""
        return ONE_STEP

    def skips(self, step: int) -> bool:
        """Whether step `step` leaves the latents unchanged."""
        return False

    def answer(self, tape: Tape, name: str) -> ComponentCall | None:
        """Return the call of the last step on `tape` that answers the next one of `name`; None: it has to run."""
        k = len(tape.steps)
        if not self.skips(k):
            return None
        nth = sum((c.step, c.component) == (k, name) for c in tape.component_calls)
        before = [c for c in tape.component_calls if (c.step, c.component) == (k - 1, name)]
        return before[nth] if nth < len(before) else None

    def finish(self, taken: int) -> None:
        """Raise `ModelError` if the pipeline has not taken the expected number of steps."""


class Compression(Skipping):
    """Compression of the steps after the window: fewer and longer steps (MixGRPO-Flash, arXiv 2507.21802)."""

    def __init__(self, window: frozenset[int], share: float) -> None:
        self.window, self.share = window, share
        self.spans: dict[int, Span] = {}
        self.expected: int | None = None  # number of steps assumed by the spans

    def begin(self, count_steps: Callable[[], int]) -> None:
        self.expected = count_steps()
        self.spans = compressed_spans(max(self.window) + 1, self.expected, self.share)

    def span(self, step: int) -> Span:
        return self.spans.get(step, ONE_STEP)

    def skips(self, step: int) -> bool:
        return self.span(step)[0] > 0

    def finish(self, taken: int) -> None:
        if self.expected not in (None, taken):
            raise ModelError(
                f"compression expected {self.expected} steps of one scheduler, but the pipeline took {taken}: set "
                "sampling.compression=1"
            )


class StructureOnly(Skipping):
    """Skipping of all steps but the first, which leaves the pipeline after `last` steps."""

    def __init__(self, last: int) -> None:
        self.last = last

    def skips(self, step: int) -> bool:
        return step > 0

    def finish(self, taken: int) -> None:
        raise ModelError(f"the pipeline took {taken} steps, {self.last} with other arguments")


def compressed_spans(first: int, total: int, compression: float) -> dict[int, Span]:
    """Return the spans of the steps `first` to `total - 1` if only `ceil(compression * m)` of these m are taken.

    The steps taken are spread evenly, starting with `first`, and each goes up to the start of the next, the last to the
    end. The others have length 0, at the sigma reached by the one before them (MixGRPO-Flash, arXiv 2507.21802).
    """
    m = total - first
    taken = max(math.ceil(compression * m - 1e-9), 1)  # 0.55 * 100 is 55.00000000000001
    starts = [first + round(j * m / taken) for j in range(taken + 1)]
    return {
        k: (0 if k == here else following - k, following - k)
        for here, following in pairwise(starts)
        for k in range(here, following)
    }
