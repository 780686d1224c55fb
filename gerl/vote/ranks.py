"""Ranks that people give, from 1 for the best, and the scores they stand for."""

from collections.abc import Sequence

from gerl.errors import RewardError

SKIPPED = 0.5  # the score of all images where they are all equal


def checked(ranks: Sequence[int], count: int) -> list[int]:
    """Ranks `[count]` without gaps: 1, 2, ...; ties share one. Raises `RewardError` for what is none."""
    if len(ranks) != count or any(not 1 <= rank <= count for rank in ranks):
        raise RewardError(f"ranks {list(ranks)!r:.80}: expected one from 1 to {count} for each of the {count} images")
    levels = sorted(set(ranks))
    return [levels.index(rank) + 1 for rank in ranks]


def scores(ranks: Sequence[int]) -> list[float]:
    """1 for the first rank, 0 for the last, the others evenly between them; all 0.5 where there is only one."""
    last = max(ranks)
    return [SKIPPED if last == 1 else 1 - (rank - 1) / (last - 1) for rank in ranks]


def mean_scores(votes: Sequence[Sequence[int]]) -> list[float]:
    """The mean over the votes `[V, B]` on a group, `[B]`."""
    columns = zip(*(scores(ranks) for ranks in votes), strict=True)
    return [sum(column) / len(column) for column in columns]
