import pytest
from hypothesis import given
from hypothesis import strategies as st

from gerl.errors import RewardError
from gerl.vote.ranks import checked, mean_scores, scores


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([2, 1, 2, 2], [0, 1, 0, 0]),  # the best is picked
        ([1, 2, 3], [1, 0.5, 0]),
        ([2, 3, 1, 3, 3], [0.5, 0, 1, 0, 0]),  # two are ranked, the others share the last place
        ([1, 1, 2], [1, 1, 0]),
        ([1, 1, 1], [0.5, 0.5, 0.5]),  # skipped
    ],
)
def test_scores_are_spread_evenly_and_ties_share(ranks: list[int], expected: list[float]) -> None:
    assert scores(ranks) == expected


@given(st.lists(st.integers(1, 6), min_size=6, max_size=6))
def test_ranks_lose_their_gaps_and_keep_their_order(ranks: list[int]) -> None:
    given_, found = checked(ranks, 6), scores(checked(ranks, 6))
    assert sorted(set(given_)) == list(range(1, len(set(ranks)) + 1))
    for a in range(6):
        for b in range(6):
            assert (ranks[a] < ranks[b]) == (given_[a] < given_[b]) == (found[a] > found[b])


@pytest.mark.parametrize("ranks", [[1, 2], [0, 1, 2], [1, 2, 4], []])
def test_what_is_no_ranking_is_refused(ranks: list[int]) -> None:
    with pytest.raises(RewardError, match="from 1 to 3 for each of the 3 images"):
        checked(ranks, 3)


def test_votes_are_averaged() -> None:
    assert mean_scores([[1, 2, 2], [2, 1, 2], [1, 1, 1]]) == pytest.approx([0.5, 0.5, 1 / 6])
