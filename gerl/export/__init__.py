"""Export a run's LoRA for other programs: `python -m gerl.export`, or `gerl.export(...)` in Python."""

from gerl.commandline.command import make_callable

make_callable(__name__, "gerl.api.commands:export")
