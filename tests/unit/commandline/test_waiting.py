import logging
import time
from collections.abc import Callable

import pytest

from gerl.commandline.waiting import duration, waiting


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_long_wait_says_what_it_is_for_and_how_far_it_is(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="gerl"), waiting("loading a", lambda: "3 of 4", after=0.01, every=0.01):
        until(lambda: len(caplog.messages) > 1)
    assert caplog.messages[0] == "loading a ..."
    assert caplog.messages[1].startswith("loading a: 0 s") and caplog.messages[1].endswith("3 of 4")
    said = len(caplog.messages)
    time.sleep(0.05)
    assert len(caplog.messages) == said  # it is over


def test_a_short_wait_says_nothing_and_an_error_ends_it(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="gerl"):
        with waiting("loading", after=60):
            pass
        with pytest.raises(KeyError), waiting("loading", after=60):
            raise KeyError
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("seconds", "words"), [(3.2, "3 s"), (89, "89 s"), (125, "2 min"), (3599, "1 h 0 min"), (11100, "3 h 5 min")]
)
def test_durations(seconds: float, words: str) -> None:
    assert duration(seconds) == words
