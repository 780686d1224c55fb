"""How many of the costly tests are run: signals, killed processes, workers of several ranks, other programs' services.

All of them with `GERL_DRILLS=all`, as in `.ci/run`; otherwise some of each kind, without those marked `more`.
"""

import os

import pytest

ALL = os.environ.get("GERL_DRILLS") == "all"
more = pytest.mark.skipif(not ALL, reason="with GERL_DRILLS=all")
