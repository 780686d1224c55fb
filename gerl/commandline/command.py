"""The frame of every command line of gerl: help, log, exit codes, output folder."""

import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from gerl.errors import ConfigError, GerlError, Interrupted

logger = logging.getLogger("gerl")


def run_command(
    argv: Sequence[str] | None,
    help_text: Callable[[], str],
    work: Callable[[list[str]], object],
    logger: logging.Logger = logger,
    log_format: str = "%(message)s",
) -> int:
    """Run `work` on the arguments (None: those of the process) and return the exit code.

    0; 1 for an error, 2 for a wrong configuration, both said in one sentence; 128 + the number of a signal. logger: the
    one whose info is shown.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if any(a in ("-h", "--help") for a in arguments):
        sys.stdout.write(help_text())
        return 0
    logging.basicConfig(level=logging.WARNING, format=log_format)
    logger.setLevel(logging.INFO)
    try:
        work(arguments)
    except Interrupted as error:
        logger.info("stopped: %s", error)
        return 128 + error.signal_number
    except KeyboardInterrupt:
        logger.info("stopped at once: what was in progress is lost")
        return 130
    except GerlError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2 if isinstance(error, ConfigError) else 1
    return 0


def make_folder(out: Path) -> None:
    """Create the output folder; raises `ConfigError` if that is not possible."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"out={out}: the folder cannot be made ({error.strerror}); choose another") from None
