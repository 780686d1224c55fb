"""How thorough the drills are that signal and kill runs: each signal and each death costs a start of processes.

With `GERL_DRILLS=all`, as in `.ci/run`, they have all of them, otherwise some.
"""

import os

ALL = os.environ.get("GERL_DRILLS") == "all"
