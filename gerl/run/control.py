"""Commands for a run that trains: files in `control/` of its folder, which the run looks for between steps."""

import contextlib
from pathlib import Path
from typing import Literal

from gerl.utils.files import writing

Command = Literal["save", "validate", "stop"]
COMMANDS: tuple[Command, ...] = ("save", "validate", "stop")
FOLDER = "control"


def ask(run_dir: Path, command: Command) -> None:
    """Ask the run to save a checkpoint, validate, or stop after its step; raises `GerlError` if that cannot be."""
    path = run_dir / FOLDER / command
    with writing(path):
        path.parent.mkdir(exist_ok=True)
        path.touch()


def asked(run_dir: Path) -> list[Command]:
    """The commands that the run has not yet followed."""
    return [command for command in COMMANDS if (run_dir / FOLDER / command).exists()]


def take(run_dir: Path, command: Command) -> bool:
    """Whether the command was given, which from now on it is not any more."""
    try:
        (run_dir / FOLDER / command).unlink()
    except OSError:  # there is none, as nearly always
        return False
    return True


def clear(run_dir: Path) -> None:
    """Forget what was asked of a run that is over, and make it possible to ask."""
    for command in COMMANDS:
        take(run_dir, command)
    with contextlib.suppress(OSError):
        (run_dir / FOLDER).rmdir()
