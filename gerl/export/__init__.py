"""Export a run's LoRA for other programs: `python -m gerl.export`, or `gerl.export(...)` in Python."""

from gerl.commandline.callable_package import make_callable

make_callable(__name__, "gerl.api.commands:export")
