import math

import pytest
import torch

from gerl.errors import ConfigError
from gerl.trainer.replay import Comparison, Number, difference, distance, place, read_tolerance


@pytest.mark.parametrize(
    ("name", "run", "replay", "expected"),
    [
        ("actor/grad_norm", 1e-6, 2e-6, 0.5),  # of any size
        ("actor/lr", 1e-5, 1e-5, 0.0),
        ("actor/loss", 1e-6, 2e-6, 1e-4),  # relative to 0.01
        ("actor/ratio_deviation", 0.0, 1e-7, 1e-7),  # relative to 1
        ("actor/kl", 2.0, 1.0, 0.5),
        ("actor/kl", None, math.nan, 0.0),
        ("actor/kl", 1.0, None, math.nan),
        ("actor/kl", math.inf, 1.0, math.nan),
    ],
)
def test_differences_are_relative(name: str, run: float | None, replay: float | None, expected: float) -> None:
    assert difference(name, run, replay) == pytest.approx(expected, nan_ok=True)


def test_tensors_are_compared_by_their_norms() -> None:
    a, nan = torch.tensor([3.0, 4.0]), torch.tensor([torch.nan, 4.0])
    assert distance("x", a, a.clone()) == Number("x", 5.0, 5.0, 0.0)
    assert distance("x", a, torch.tensor([3.0, 3.0])).difference == pytest.approx(1 / 5)
    assert distance("x", nan, nan.clone()).difference == 0.0
    assert math.isnan(distance("x", a, nan).difference) and math.isnan(distance("x", a, a[:1]).difference)


def test_what_a_bug_shows_in_comes_first() -> None:
    names = [
        "reward/mean",
        "actor/kl",
        "actor/loss",
        "actor/grad_norm",
        "actor/step_grad_norm/3",
        "actor/ratio_deviation",
    ]
    assert sorted(names, key=place) == names[::-1]


def test_a_number_that_is_missing_is_beyond_any_tolerance() -> None:
    numbers = [Number("a", 1.0, 1.0, 0.0), Number("b", 1.0, 1.1, 0.1), Number("c", 1.0, None, math.nan)]
    found = Comparison(1, numbers, False, [], 1, tolerance=0.2)
    assert [n.name for n in found.beyond] == ["c"] and not found.exact
    equal = Comparison(1, numbers[:1], True, [], 1, tolerance=0.0)
    assert equal.exact and not equal.beyond
    # the same numbers and other weights: one of them was changed
    assert [n.name for n in Comparison(1, numbers[:1], False, [], 1, tolerance=0.2).beyond] == ["weights"]


def test_the_tolerance_is_a_number() -> None:
    assert read_tolerance(None) is None and read_tolerance("0") == 0 and read_tolerance("1e-3") == 1e-3
    for text in ("-1", "x", "nan", "inf"):
        with pytest.raises(ConfigError, match=f"tolerance={text}: "):
            read_tolerance(text)
