"""Credit of trees, pairs, best samples and regression weights against naive twins, closed forms and golden numbers."""

import math
from collections import defaultdict
from collections.abc import Callable
from statistics import fmean, pstdev

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gerl.algorithms.core_algos import (
    best_of_group,
    largest_of_groups,
    preference_pairs,
    regression_weights,
    tree_advantages,
)

LEAVES = torch.arange(16)
BINARY = torch.stack([LEAVES // size for size in (16, 8, 4, 2, 1)], 1)  # node of each leaf, from the root down
rewards_with_ties = st.one_of(st.sampled_from([0.0, 0.5, 1.0]), st.floats(-3, 3, width=16))


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[float], list[int]]:
    """Rewards of groups of 1 to 4, in any order."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    groups = draw(st.permutations([7 * g - 3 for g, size in enumerate(sizes) for _ in range(size)]))
    return draw(st.lists(rewards_with_ties, min_size=len(groups), max_size=len(groups))), groups


def members_of(groups: list[int]) -> list[list[int]]:
    return [[i for i, other in enumerate(groups) if other == g] for g in dict.fromkeys(groups)]


def credit(
    function: Callable[..., torch.Tensor], rewards: list[float], groups: list[int], **options: float
) -> list[float]:
    return function(torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups), **options).tolist()


# --- trees


def test_golden_tree_of_sixteen_leaves() -> None:  # T27
    got = tree_advantages(LEAVES.float(), BINARY, torch.zeros(16, dtype=torch.long))
    assert got.shape == (16, 5) and got.dtype == torch.float32
    assert got[:, 0].tolist() == [0.0] * 16  # the root
    # rewards 3.5 and 11.5 at depth 1; 1.5, 5.5, 9.5, 13.5 at depth 2
    assert got[:, 1].tolist() == pytest.approx([-1.0] * 8 + [1.0] * 8)
    middle, outer = 2 / math.sqrt(20), 6 / math.sqrt(20)
    assert got[:, 2].tolist() == pytest.approx([-outer] * 4 + [-middle] * 4 + [middle] * 4 + [outer] * 4)
    assert got.sum(0).tolist() == pytest.approx([0.0] * 5, abs=1e-5)
    assert tree_advantages(2 * LEAVES, BINARY, torch.zeros(16, dtype=torch.long)).dtype == torch.float32


def test_every_node_counts_once_however_many_leaves_it_has() -> None:
    rewards = torch.tensor([0.0, 2.0, 4.0, 8.0, 11.0])
    nodes = torch.tensor([[0, 5], [0, 5], [0, 5], [0, 6], [0, 7]])  # node rewards 2, 8, 11: mean 7, variance 14
    got = tree_advantages(rewards, nodes, torch.zeros(5, dtype=torch.long), eps=0.0)
    expected = [(r - 7) / math.sqrt(14) for r in (2, 2, 2, 8, 11)]
    assert got[:, 1].tolist() == pytest.approx(expected)
    assert tree_advantages(rewards, nodes, torch.zeros(5, dtype=torch.long), eps=1.0)[:, 1].tolist() == pytest.approx(
        [e * math.sqrt(14) / (math.sqrt(14) + 1) for e in expected]
    )


@st.composite
def forests(draw: st.DrawFn) -> tuple[list[float], list[list[int]], list[int]]:
    """Unbalanced trees of depth 3: rewards of the leaves, their ancestors (ids repeat in other trees), their tree."""
    widths = st.integers(1, 3)
    nodes, groups = [], []
    for group in range(draw(st.integers(1, 2))):
        ids = [0, 0]
        for _ in range(draw(widths)):
            for _ in range(draw(widths)):
                for _ in range(draw(widths)):
                    nodes.append([*ids, len(nodes)])
                    groups.append(5 * group)
                ids[1] += 1
            ids[0] += 1
    order = draw(st.permutations(range(len(nodes))))
    rewards = draw(st.lists(rewards_with_ties, min_size=len(nodes), max_size=len(nodes)))
    return rewards, [nodes[i] for i in order], [groups[i] for i in order]


@given(forests())
def test_tree_advantages_equal_their_naive_twin(forest: tuple[list[float], list[list[int]], list[int]]) -> None:
    rewards, nodes, groups = forest
    got = tree_advantages(torch.tensor(rewards, dtype=torch.float64), torch.tensor(nodes), torch.tensor(groups))
    for depth in range(3):
        leaves: dict[tuple[int, int], list[float]] = defaultdict(list)
        for reward, ids, group in zip(rewards, nodes, groups, strict=True):
            leaves[group, ids[depth]].append(reward)
        for i, (ids, group) in enumerate(zip(nodes, groups, strict=True)):
            values = [fmean(rs) for (g, _), rs in leaves.items() if g == group]
            own, std = fmean(leaves[group, ids[depth]]), pstdev(values)
            expected = (own - fmean(values)) / (std + 1e-8) if std > 1e-6 else 0.0
            assert got[i, depth].item() == pytest.approx(expected, abs=1e-6)


def test_a_tree_without_signal_gets_exactly_zero() -> None:
    one = torch.zeros(16, dtype=torch.long)
    assert not tree_advantages(torch.full((16,), 0.1), BINARY, one).any()
    assert not tree_advantages(0.5 + 1e-7 * LEAVES.double(), BINARY, one)[:, 1:3].any()  # a std below 1e-6
    assert tree_advantages(1e-3 * LEAVES.double(), BINARY, one)[:, 1:].all()


# --- pairs, best samples, regression weights


@given(batches())
def test_preference_pairs_are_the_first_best_and_the_first_worst(batch: tuple[list[float], list[int]]) -> None:
    rewards, groups = batch
    expected = [0.0] * len(rewards)
    for members in members_of(groups):
        if len({rewards[i] for i in members}) > 1:
            expected[max(members, key=lambda i: rewards[i])] = 1.0
            expected[min(members, key=lambda i: rewards[i])] = -1.0
    assert credit(preference_pairs, rewards, groups) == expected


@given(batches())
def test_the_best_of_a_group_are_all_that_reach_its_highest_reward(batch: tuple[list[float], list[int]]) -> None:
    rewards, groups = batch
    expected = [0.0] * len(rewards)
    for members in members_of(groups):
        highest = max(rewards[i] for i in members)
        if min(rewards[i] for i in members) < highest:
            for i in members:
                expected[i] = float(rewards[i] == highest)
    assert credit(best_of_group, rewards, groups) == expected


@given(batches(), st.floats(0.05, 10))
def test_regression_weights_equal_their_naive_twin(batch: tuple[list[float], list[int]], temperature: float) -> None:
    rewards, groups = batch
    got = credit(regression_weights, rewards, groups, temperature=temperature)
    for members in members_of(groups):
        values, weights = [rewards[i] for i in members], [got[i] for i in members]
        if len(set(values)) == 1:
            assert weights == [0.0] * len(members)
            continue
        mean, std = fmean(values), pstdev(values)
        powers = [math.exp((v - mean) / (std + 1e-4) / temperature) for v in values]
        assert weights == pytest.approx([len(values) * p / math.fsum(powers) for p in powers], rel=1e-6, abs=1e-12)
        assert fmean(weights) == pytest.approx(1)


def test_a_low_temperature_regresses_to_the_best_and_a_high_one_to_all() -> None:
    rewards, groups = torch.tensor([1.0, 2.0, 3.0, 3.0]), torch.zeros(4, dtype=torch.long)
    assert regression_weights(rewards, groups, 1e-4).tolist() == pytest.approx([0, 0, 2, 2])
    assert regression_weights(rewards, groups, 1e4).tolist() == pytest.approx([1] * 4, abs=1e-3)


@pytest.mark.parametrize("function", [preference_pairs, best_of_group, lambda r, g: regression_weights(r, g, 0.5)])
def test_credit_of_groups(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    """Equal rewards give exact zeros, whole numbers are rewards too, shapes count."""
    assert function(torch.tensor([3, 9, 1]), torch.zeros(3)).dtype == torch.float32
    equal = torch.tensor([0.1] * 11 + [0.7] * 7)
    assert function(equal, torch.tensor([0] * 11 + [1] * 7)).tolist() == [0.0] * 18

    with pytest.raises(ValueError, match=r"\[B\], got \[2\] and \[1\]"):
        function(torch.zeros(2), torch.zeros(1))
    with pytest.raises(ValueError, match="finite"):
        function(torch.tensor([0.0, math.inf]), torch.zeros(2))


def test_the_largest_advantages_of_each_group_are_kept() -> None:
    advantages = torch.tensor([0.5, -2.0, 1.0, 0.1, 3.0, -0.2, 0.3, 0.0, 0.0])
    groups = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 2])
    kept = largest_of_groups(advantages, groups, 0.5)
    nan = torch.nan
    expected = torch.tensor([nan, -2.0, 1.0, nan, 3.0, nan, 0.3, 0.0, nan])
    assert torch.equal(kept.nan_to_num(9.0), expected.nan_to_num(9.0))
    assert torch.equal(largest_of_groups(advantages, groups, 1.0), advantages)
