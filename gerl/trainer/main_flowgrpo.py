"""The entry point: `python -m gerl.trainer.main_flowgrpo [experiment=NAME] [key=value ...]`.

Signals are handled first, then the keys and the run to resume are read, and only then torch and Ray imported.
"""

import sys
from collections.abc import Sequence

from gerl.commandline import signals
from gerl.commandline.command import run_command


def main(argv: Sequence[str] | None = None, program: str = "python -m gerl.trainer.main_flowgrpo") -> int:
    """Run the command line; returns the exit code, see `run_command`. `program`: the command as typed, for messages."""
    arguments = sys.argv[1:] if argv is None else argv

    def help_page() -> str:
        from gerl.commandline.help import help_text

        return help_text(program, arguments)

    return run_command(argv, help_page, train)


def train(arguments: list[str]) -> None:
    """Check the keys and the run to resume, then train; with `-m` once for each combination of values."""
    from gerl.commandline.composition import hydra_options

    options = hydra_options(arguments)
    arguments = options.arguments
    if options.shown:
        from gerl.commandline.composition import compose_run

        sys.stdout.write(compose_run(arguments).yaml())
        return
    if options.multirun:
        from gerl.trainer.sweep import sweep

        sweep(arguments)
        return
    from gerl.trainer.run_folder import open_run

    folder = open_run(arguments)
    if folder is None:
        return
    with folder:
        from gerl.trainer.launch import launch

        launch(folder, arguments)


if __name__ == "__main__":
    signals.exit_with(main())
