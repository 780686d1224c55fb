import gc
import importlib
import importlib.metadata
import logging
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from drills import more

from gerl.progress import duration, waiting
from gerl.utils.imports import WhenRead, importing

ROOT = Path(__file__).resolve().parents[3]
IMPORTS = """
from gerl.utils.imports import WhenRead, importing

with importing():
    import diffusers
found = diffusers.utils.import_utils._package_map
assert isinstance(found, WhenRead) and "data" not in vars(found), "it was read"
assert found["diffusers"] == ["diffusers"]
"""


def test_garbage_is_not_looked_for_meanwhile() -> None:
    with importing():
        assert not gc.isenabled()
        with importing():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_failed_import_leaves_all_as_it_was() -> None:
    find = importlib.metadata.packages_distributions
    with pytest.raises(ImportError), importing():
        assert importlib.metadata.packages_distributions is not find
        importlib.import_module("gerl.no_such_module")
    assert gc.isenabled() and importlib.metadata.packages_distributions is find


def test_distributions_are_those_that_are_installed() -> None:
    with importing():
        found = importlib.metadata.packages_distributions()
    assert isinstance(found, WhenRead) and "torch" in found and "no_such_package" not in found
    assert dict(found) == dict(importlib.metadata.packages_distributions())


@more
def test_diffusers_looks_through_no_installed_package() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTS], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


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
