"""How many of the tests are run that signal and kill processes over Ray: each signal and each death costs a start.

All of them with `GERL_DRILLS=all`, as in `.ci/run`; otherwise one of each kind, without those marked `more`.
"""

import os

import pytest

ALL = os.environ.get("GERL_DRILLS") == "all"
more = pytest.mark.skipif(not ALL, reason="with GERL_DRILLS=all")
