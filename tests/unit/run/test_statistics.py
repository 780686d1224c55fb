import math
from statistics import NormalDist

import numpy as np
import pytest

from gerl.run.statistics import bootstrap, estimate, share_interval


@pytest.mark.parametrize(("ones", "n"), [(30, 40), (3, 25), (20, 20)])
def test_the_interval_of_a_share_has_the_quantiles_of_a_binomial(ones: int, n: int) -> None:
    low, high = bootstrap([1.0] * ones + [0.0] * (n - ones))
    chances = [math.comb(n, k) * (ones / n) ** k * (1 - ones / n) ** (n - k) for k in range(n + 1)]
    exact = np.searchsorted(np.cumsum(chances), [0.025, 0.975]) / n
    assert [low, high] == pytest.approx(list(exact), abs=1.01 / n if ones < n else 1e-12)


def test_the_interval_of_many_values_is_that_of_the_normal_distribution() -> None:
    values = np.random.default_rng(0).exponential(size=400)
    low, high = bootstrap(list(values), confidence=0.8)
    half = NormalDist().inv_cdf(0.9) * values.std() / math.sqrt(400)
    assert low == pytest.approx(values.mean() - half, abs=0.06 * half)
    assert high == pytest.approx(values.mean() + half, abs=0.06 * half)
    assert bootstrap(list(values)) == bootstrap(list(values)) != bootstrap(list(values), seed=1)


def test_about_95_of_100_intervals_hold_the_true_mean() -> None:
    generator = np.random.default_rng(1)
    intervals = [bootstrap(list(generator.normal(3.0, 2.0, 30))) for _ in range(100)]
    held = np.mean([low <= 3.0 <= high for low, high in intervals])
    assert abs(held - 0.94) < 3 * math.sqrt(0.94 * 0.06 / 100)  # 0.94 of 1500: the percentile interval is a bit narrow


def test_images_of_a_prompt_are_averaged_before_prompts_are_resampled() -> None:
    values, ids = [1.0, 3.0, 10.0, None, None, None], [0, 0, 1, 1, 2, 2]
    found = estimate(ids, values)
    assert (found.mean, found.count) == (6.0, 2)
    assert (found.low, found.high) == bootstrap([2.0, 10.0])
    copies = estimate([0, 1, 2] * 50, [1.0, 2.0, 6.0] * 50)  # not 150 independent images
    assert (copies.low, copies.high) == pytest.approx(bootstrap([1.0, 2.0, 6.0]))


def test_too_few_prompts_have_no_interval() -> None:
    one, none = estimate([4], [2.5]), estimate([4, 5], [None, None])
    assert (one.mean, one.count, none.count) == (2.5, 1, 0)
    assert math.isnan(one.low) and math.isnan(one.high) and math.isnan(none.mean)


def test_the_exact_interval_of_a_share_has_the_tails_of_a_binomial() -> None:
    low, high = share_interval(7, 20, 0.9)
    above = sum(math.comb(20, k) * low**k * (1 - low) ** (20 - k) for k in range(7, 21))
    below = sum(math.comb(20, k) * high**k * (1 - high) ** (20 - k) for k in range(8))
    assert (above, below) == pytest.approx((0.05, 0.05))
    assert share_interval(0, 20) == (0.0, pytest.approx(1 - 0.025 ** (1 / 20)))
    assert share_interval(20, 20)[1] == 1.0
