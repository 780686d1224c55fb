"""The tests of the benchmarks run in CI only."""

from drills import ALL

collect_ignore_glob = [] if ALL else ["test_*.py"]
