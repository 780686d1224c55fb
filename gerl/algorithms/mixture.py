"""The order of the prompts of a mixture of weighted sources, as a pure function of seed and step."""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor

import numpy as np

from gerl.data.sources import most_of_a_step

HALF = Fraction(1, 2)


@dataclass(frozen=True)
class MixtureSchedule:
    """Which prompts a trainer step uses, where each source has a weight; the sources lie one after the other.

    Occurrence j (from 0) of source i is due at time (j + 1/2) / weight_i, and a step takes the next `per_step` ones in
    the order of these times (stride scheduling), so that each source has its share of the prompts, up to rounding, of
    every step. Within a source the prompts come in passes, each prompt once a pass. With `shuffle` every pass has its
    own order: which half of the pass a prompt comes in is drawn once, its place there anew, so that no prompt comes
    twice in a step.
    """

    sizes: tuple[int, ...]
    weights: tuple[Fraction, ...]
    per_step: int
    shuffle: bool
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        """Steps after which every prompt of every source has come."""
        each = zip(self.sizes, self.weights, strict=True)
        return max(ceil(size / (self.per_step * weight / sum(self.weights))) for size, weight in each)

    def epoch(self, step: int) -> int:
        """The epoch (from 0) that `step` (from 0) belongs to."""
        return step // self.steps_per_epoch

    def batch(self, step: int) -> list[int]:
        """Indices of the prompts of `step` (from 0)."""
        orders: dict[tuple[int, int], np.ndarray] = {}
        chosen: list[int] = []
        for source, number in self._due(step * self.per_step):
            turn, place = divmod(number, self.sizes[source])
            if (source, turn) not in orders:
                orders[source, turn] = sum(self.sizes[:source]) + self._order(source, turn)
            chosen.append(int(orders[source, turn][place]))
            if len(chosen) == self.per_step:
                break
        return chosen

    def mixed(self, order: Sequence[int]) -> list[int]:
        """The indices in their order within a source, the sources mixed by the weights."""
        ends = np.cumsum(self.sizes)
        counts = [0] * len(self.sizes)
        due = []
        for index in order:
            source = int(np.searchsorted(ends, index, side="right"))
            due.append(((counts[source] + HALF) / self.weights[source], source, index))
            counts[source] += 1
        return [index for _, _, index in sorted(due)]

    def _due(self, first: int) -> Iterator[tuple[int, int]]:
        """(source, number of the occurrence) from place `first` (from 0) of the order on, without end."""
        time = Fraction(max(0, first - len(self.sizes))) / sum(self.weights)
        done = [floor(weight * time + HALF) for weight in self.weights]  # whose time has come: at most `first`
        queue = [((n + HALF) / weight, i, n) for i, (n, weight) in enumerate(zip(done, self.weights, strict=True))]
        heapq.heapify(queue)
        place = sum(done)
        while True:
            _, source, number = queue[0]
            heapq.heapreplace(queue, ((number + 1 + HALF) / self.weights[source], source, number + 1))
            if place >= first:
                yield source, number
            place += 1

    def _order(self, source: int, turn: int) -> np.ndarray:
        """The order of a source in its pass number `turn`."""
        size = self.sizes[source]
        if not self.shuffle:
            return np.arange(size)
        order = self._generator(source, 0).permutation(size)
        if size < 2 * most_of_a_step(self.weights, self.per_step)[source]:
            return order  # the same in every pass: any other could bring a prompt twice in a step
        halves = order[: size // 2], order[size // 2 :]
        generator = self._generator(source, turn + 1)
        return np.concatenate([generator.permutation(half) for half in halves])

    def _generator(self, *parts: int) -> np.random.Generator:
        return np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=parts))
