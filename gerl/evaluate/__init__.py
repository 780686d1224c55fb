"""Compare a base model with LoRAs: `python -m gerl.evaluate`, or `gerl.evaluate(...)` in Python."""

from gerl.commandline.callable_package import make_callable

make_callable(__name__, "gerl.api.commands:evaluate")
