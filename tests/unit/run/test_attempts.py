"""Success rates, the best of n and pass@k against the loop over all subsets, and their intervals."""

import math
from itertools import combinations
from math import comb

import numpy as np
import pytest

from gerl.run.attempts import attempts, best_of, is_printed
from gerl.run.validation import estimate, estimate_share, mean_interval, wilson_interval


@pytest.mark.parametrize("k", range(1, 6))
def test_the_best_of_k_is_the_mean_over_all_subsets(k: int) -> None:
    values = [0.3, -1.0, 2.5, 0.3, 7.0]
    assert best_of(values, k) == pytest.approx(np.mean([max(chosen) for chosen in combinations(values, k)]))
    for successes in range(6):
        passed = [1.0] * successes + [0.0] * (5 - successes)
        assert best_of(passed, k) == pytest.approx(1 - comb(5 - successes, k) / comb(5, k))


def test_pass_at_k_is_unbiased_and_has_no_overflow() -> None:
    generator, rate = np.random.default_rng(0), 0.2
    estimates = [best_of((generator.random(6) < rate).astype(float).tolist(), 3) for _ in range(4000)]
    assert np.mean(estimates) == pytest.approx(1 - (1 - rate) ** 3, abs=0.02)
    assert best_of([1.0] + [0.0] * 2999, 1500) == pytest.approx(0.5)


def test_the_columns_of_several_images_per_prompt() -> None:
    ids, values = [3, 3, 3, 7, 7, 7], [0.1, 0.9, 0.5, 0.2, 0.3, 0.8]
    found = attempts(ids, values, success=0.5)
    assert list(found) == ["success_rate", "best_of_n", "pass_at_1", "pass_at_2", "pass_at_3"]
    assert found["success_rate"].ids == ids and found["success_rate"].values == [0, 1, 1, 0, 0, 1]
    assert found["best_of_n"].ids == [3, 7] and found["best_of_n"].values == [0.9, 0.8]
    assert found["pass_at_1"].values == pytest.approx([2 / 3, 1 / 3])
    assert found["pass_at_2"].values == pytest.approx([1.0, 2 / 3]) and found["pass_at_3"].values == [1.0, 1.0]
    assert found["pass_at_1"].estimate().mean == pytest.approx(found["success_rate"].estimate().mean)
    assert list(attempts(ids, values)) == ["best_of_n"]  # no score counts as a success


def test_a_single_image_per_prompt_has_its_success_and_nothing_else() -> None:
    assert attempts([0, 1], [0.4, 0.6]) == {} and attempts([], [], 0.5)["success_rate"].values == []
    (found,) = attempts([0, 1, 2], [0.4, None, 0.6], 0.5).values()
    assert found.values == [0.0, None, 1.0] and found.estimate().mean == 0.5


def test_a_prompt_with_too_few_scores_has_no_value() -> None:
    found = attempts([0, 0, 0, 1, 1, 1], [1.0, None, 0.0, 1.0, 1.0, 0.0], success=1.0)
    assert found["best_of_n"].values == [None, 1.0] and found["pass_at_2"].values == [1.0, 1.0]
    assert found["pass_at_3"].values == [None, 1.0]


@pytest.mark.parametrize(("successes", "total"), [(0, 10), (3, 10), (10, 10), (77, 128)])
def test_independent_successes_have_wilsons_interval(successes: int, total: int) -> None:
    found = estimate_share(range(total), [1.0] * successes + [0.0] * (total - successes))
    assert (found.low, found.high) == wilson_interval(successes / total, total) and found.count == total
    for edge in (found.low, found.high):  # the shares that a z test of this sample does not reject
        if 1e-9 < edge < 1 - 1e-9:
            z = (found.mean - edge) / math.sqrt(edge * (1 - edge) / total)
            assert abs(z) == pytest.approx(1.959964, abs=1e-5)
    assert wilson_interval(0.3, 10) == pytest.approx((0.1078, 0.6032), abs=1e-4)


def test_images_of_a_prompt_are_not_independent() -> None:
    ids, reached = [0, 0, 1, 1, 2, 2], [1.0, 0.0, 1.0, 1.0, 0.0, None]
    found = estimate_share(ids, reached)
    assert found == estimate(ids, reached, (0.0, 1.0))
    assert (found.low, found.high) == mean_interval([[0.5, 1.0, 0.0]], (0.0, 1.0))
    alike = estimate_share([0, 0, 1, 1], [1.0, 1.0, 0.0, 0.0])  # both images of each prompt say the same
    assert (alike.low, alike.high) == wilson_interval(0.5, 2)
    assert math.isnan(estimate_share([0, 0], [1.0, 1.0]).low)


def test_a_table_shows_some_of_pass_at_k() -> None:
    names = ["mean", *(f"ocr/pass_at_{k}" for k in range(1, 13))]
    shown = [name for name in names if is_printed(name, names)]
    assert shown == ["mean", "ocr/pass_at_2", "ocr/pass_at_4", "ocr/pass_at_8", "ocr/pass_at_12"]
