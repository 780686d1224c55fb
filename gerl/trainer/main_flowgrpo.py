"""The entry point: `python -m gerl.trainer.main_flowgrpo [experiment=NAME] [key=value ...]`.

It listens to signals first, then reads the keys and the run to carry on, and then imports torch and Ray.
"""

import sys
from collections.abc import Sequence

from gerl.commandline import signals
from gerl.commandline.command import run_command


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code, see `run_command`."""
    given, program = sys.argv[1:] if argv is None else argv, "python -m gerl.trainer.main_flowgrpo"

    def help_page() -> str:
        from gerl.commandline.help import help_text

        return help_text(program, given)

    return run_command(argv, help_page, train)


def train(arguments: list[str]) -> None:
    """Check the keys and the run to carry on, then train."""
    from gerl.trainer.resuming import open_run

    folder = open_run(arguments)
    if folder is None:
        return
    with folder:
        from gerl.trainer.run import run

        run(folder, arguments)


if __name__ == "__main__":
    signals.exit_with(main())
