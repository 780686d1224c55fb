"""Draws and weights of reward gradients."""

from collections import Counter

import numpy as np
import pytest

from gerl.algorithms.surrogates import (
    drawn_length,
    evenly_spread,
    generator,
    lagrange_weights,
    late_biased,
    parted_steps,
    scale_up,
    split_count,
    spread_supports,
    two_steps,
)


def test_lagrange_weights_integrate_polynomials_exactly() -> None:
    points = [0.9, 0.6, 0.4]
    weights = lagrange_weights(points, 0.9, 0.2)
    for power in range(3):
        exact = (0.2 ** (power + 1) - 0.9 ** (power + 1)) / (power + 1)
        assert sum(w * p**power for w, p in zip(weights, points, strict=True)) == pytest.approx(exact)
    assert lagrange_weights([0.9], 0.9, 0.2) == pytest.approx([-0.7])  # Euler


def test_lengths_are_redrawn_until_they_fit() -> None:
    draws = [drawn_length(8, 5.0, 10, generator(0, k)) for k in range(500)]
    assert min(draws) >= 1 and max(draws) <= 10 and len(set(draws)) == 10
    assert np.mean(draws) == pytest.approx(6.0, abs=0.4)  # of a normal distribution cut at 0.5 and 10.5
    assert drawn_length(8, 0.0, 5, generator(0)) == 5


def test_late_steps_are_likelier_by_a_power() -> None:
    counts = Counter(k for n in range(4000) for k in late_biased(range(2, 5), 1, 2.0, generator(n)))
    assert [counts[k] / 4000 for k in (2, 3, 4)] == pytest.approx([1 / 14, 4 / 14, 9 / 14], abs=0.03)
    assert late_biased(range(4), 9, 1.0, generator(0)) == [0, 1, 2, 3]
    assert len(set(late_biased(range(9), 4, 1.0, generator(0)))) == 4


def test_even_steps_are_equally_far_apart_and_begin_anywhere() -> None:
    found = {tuple(evenly_spread(10, 3, generator(n))) for n in range(200)}
    assert found == {(0, 3, 6), (1, 4, 7), (2, 5, 8), (3, 6, 9)}
    assert evenly_spread(2, 3, generator(0)) == [0, 1]


def test_pairs_are_in_order_and_of_all_steps() -> None:
    pairs = Counter(two_steps(3, generator(n)) for n in range(3000))
    assert set(pairs) == {(0, 1), (0, 2), (1, 2)} and min(pairs.values()) > 900


def test_parted_steps_are_shared_after_between_and_before() -> None:
    sharp = [1e6 * share for share in (0.8, 0.15, 0.05)]
    assert parted_steps(20, sharp, None, generator(0)) == (0, 3)  # 16 steps after the second, 3 from the first to it
    assert parted_steps(20, sharp[::-1], None, generator(0)) == (15, 18)
    assert parted_steps(20, sharp, 10, generator(0)) == (7, 10)  # what is above goes before the first
    assert {parted_steps(3, [1, 1, 1], None, generator(n)) for n in range(50)} == {(0, 1)}
    drawn = np.array([parted_steps(25, [2.5, 6.0, 2.0], 10, generator(n)) for n in range(4000)])
    k, j = drawn.T  # means as of RuoyuWang-2077/FlowBP
    assert k.min() >= 0 and (k < j).all() and j.min() == 15 and j.max() == 23
    assert k.mean() == pytest.approx(4.1, abs=0.15) and j.mean() == pytest.approx(18.4, abs=0.15)


@pytest.mark.parametrize(("count", "before", "after", "expected"), [(5, 10, 15, (2, 3)), (4, 1, 9, (1, 3)),
                                                                    (2, 9, 1, (1, 1)), (9, 2, 2, (2, 2)),
                                                                    (5, 24, 1, (4, 1))])  # fmt: skip
def test_active_steps_are_shared_by_length(count: int, before: int, after: int, expected: tuple[int, int]) -> None:
    assert split_count(count, before, after) == expected


def test_scaling_up_and_supports() -> None:
    lengths = [-0.1, -0.2, -0.3, -0.4]
    assert scale_up(lengths, [1, 2], 1.0) == pytest.approx(2.0) and scale_up(lengths, [1, 2], 0.5) == pytest.approx(1.5)
    assert scale_up(lengths, [0], 0.0) == 1
    assert spread_supports(3, 5, 3) == [3, 4] and spread_supports(2, 11, 3) == [2, 6, 10]
