"""Evaluate a reward before training on it: `python -m gerl.score`, or `gerl.score(...)` in Python."""

from gerl.commandline.callable_package import make_callable

make_callable(__name__, "gerl.api.commands:score")
