"""Check a run before starting it: `python -m gerl.preflight`, or `gerl.preflight(...)` in Python."""

from gerl.commandline.callable_package import make_callable

make_callable(__name__, "gerl.api.commands:preflight")
