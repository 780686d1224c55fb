"""Rollouts that skip denoising steps: compression (MixGRPO-Flash), and records of the mere structure of a call.

A skipped step leaves the latents as they are and needs no output of the denoiser: it is answered with that of the step
before, whose shape is right.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

from gerl.engine.record import EveryStep
from gerl.engine.transitions import ONE_STEP, Span
from gerl.errors import ModelError


class Compression(EveryStep):
    """Takes only a part of the steps after the window, each as far as several (MixGRPO-Flash, arXiv 2507.21802)."""

    def __init__(self, window: frozenset[int], share: float) -> None:
        self.window, self.share = window, share
        self.spans: dict[int, Span] = {}
        self.expected: int | None = None  # number of steps that the spans rely on

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


class StructureOnly(EveryStep):
    """Skips all steps but the first, and leaves the pipeline after `last` of them."""

    def __init__(self, last: int) -> None:
        self.last = last

    def skips(self, step: int) -> bool:
        return step > 0

    def finish(self, taken: int) -> None:
        raise ModelError(f"the pipeline took {taken} steps, {self.last} with other arguments")


def compressed_spans(first: int, total: int, compression: float) -> dict[int, Span]:
    """How far the steps `first` to `total - 1` go if only `ceil(compression * m)` of these m are taken.

    The steps that are taken are spread evenly, begin with `first`, and each goes as far as the next one begins, the
    last to the end. The others have length 0, at the sigma that the one before them reached (MixGRPO-Flash, arXiv
    2507.21802).
    """
    m = total - first
    taken = max(math.ceil(compression * m - 1e-9), 1)  # 0.55 * 100 is 55.00000000000001
    starts = [first + round(j * m / taken) for j in range(taken + 1)]
    return {
        k: (0 if k == here else following - k, following - k)
        for here, following in pairwise(starts)
        for k in range(here, following)
    }
