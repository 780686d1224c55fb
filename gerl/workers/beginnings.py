"""Samples that begin alike, by prompt and initial noise: up to the first noise of a step one of them is drawn."""

from collections.abc import Sequence

from gerl.protocol import Sample


def beginnings(samples: Sequence[Sample]) -> tuple[list[int], list[int]]:
    """The first sample of each kind, and for each sample the position of its kind among these.

    Samples with initial noise of their own (`init_seed` is None) are alike with no other.
    """
    kinds: dict[tuple[int, int | None], int] = {}
    first: list[int] = []
    rows: list[int] = []
    for i, sample in enumerate(samples):
        kind = (sample.prompt.id, sample.init_seed) if sample.init_seed is not None else (-1, i)
        if kind not in kinds:
            kinds[kind] = len(first)
            first.append(i)
        rows.append(kinds[kind])
    return first, rows
