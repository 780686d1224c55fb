import math
from typing import Any

import pytest

from gerl.verify.findings import SHOWN, Check, Tally, Wrong, apart, table


@pytest.mark.parametrize(
    ("recorded", "found", "expected"),
    [
        (1.0, 1.0, 0.0),
        (2, 2.0, 0.0),
        (math.nan, math.nan, 0.0),
        (2.0, 1.0, 0.5),
        (-1.0, 1.0, 2.0),
        (0.001, 0.0, 0.1),  # relative to 0.01
        (math.inf, 1.0, math.inf),
        (math.nan, 1.0, math.inf),
        (None, 1.0, math.inf),
        (True, False, math.inf),
        ("a", "a", 0.0),
        ([1, 2], [1, 3], math.inf),
    ],
)
def test_how_far_two_values_are_apart(recorded: Any, found: Any, expected: float) -> None:
    assert apart(recorded, found) == apart(found, recorded) == pytest.approx(expected)


def test_a_tally_counts_and_names_what_differs() -> None:
    tally = Tally()
    assert tally.result("x", "numbers").status == "not checked"
    tally.compare("a.json", "k", 1.0, 1.0)
    tally.compare("a.json", "k", 1.0, 1.0005, tolerance=1e-3)
    assert tally.result("x", "numbers") == Check("x", "ok", "numbers, up to 5e-04")
    tally.compare("a.json", "k", 1.0, 1.5, step=3)
    result = tally.result("x", "numbers")
    assert result.status == "failed" and result.text.startswith("1 of 3 ")
    assert result.wrong == [Wrong("a.json", "k", 1.0, 1.5, 3)]
    assert str(result.wrong[0]) == "a.json, step 3: k is 1.0, and 1.5 recomputed"


def test_the_table_has_the_first_values_that_differ() -> None:
    wrong = [Wrong("a.json", f"k{i}", i, i + 1) for i in range(SHOWN + 2)]
    checks = [Check("first", "failed", "numbers", wrong), Check("the second", "ok", "words " * 40)]
    lines = table(checks, width=60).splitlines()
    assert lines[0].split() == ["first", "failed", "numbers"] and "k4" in lines[5] and "2 more" in lines[6]
    assert max(map(len, lines)) <= 60 and lines[7].startswith("the second")
