"""Run a command line: help, log, signals, exit codes, output folder."""

import contextlib
import logging
import shlex
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path

from gerl.commandline import signals
from gerl.errors import ConfigError, GerlError, Interrupted, Stopped, causes
from gerl.utils.imports import importing

logger = logging.getLogger("gerl")
PAGE = 8765  # the default port of `gerl watch`
WITH_LEVELS = "%(levelname)s %(name)s: %(message)s"  # the log of a service


def run_command(
    argv: Sequence[str] | None,
    help_text: Callable[[], str],
    work: Callable[[list[str]], object],
    logger: logging.Logger = logger,
    log_format: str = "%(message)s",
) -> int:
    """Run `work` on the arguments (None: those of the process) and return the exit code.

    0: success; 1: an error; 2: a wrong configuration, both printed as one sentence; 128 + N: signal N. `logger`: whose
    info messages are shown. Notes of the exception (the saved checkpoint) are printed with it.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(level=logging.WARNING, format=log_format)

    def run() -> int:
        if any(a in ("-h", "--help") for a in arguments):
            sys.stdout.write(help_text())
        else:
            work(arguments)
        return 0

    return _ended(run, logger)


def start(
    module: str, log_format: str = "%(message)s", arguments: Sequence[str] | None = None, program: str | None = None
) -> int:
    """Import the `module` of a command, with signals handled, and run its `main`; `program`: the command as typed."""
    logging.basicConfig(level=logging.WARNING, format=log_format)

    def work() -> int:
        with importing():
            command = import_module(module)
        return int(command.main(arguments) if program is None else command.main(arguments, program))

    return _ended(work, logger)


def _ended(work: Callable[[], int], logger: logging.Logger) -> int:
    """Return the exit code of `work`, or of the exception that ends it; a signal decides it even after an error."""
    logger.setLevel(logging.INFO)
    with signals.handled():
        try:
            return work()
        except BaseException as error:
            # Ray and other C code turn an interruption into exceptions of their own: the signal counts
            number = signals.received()
            if number is None and isinstance(error, Stopped):
                logger.info("%s", with_notes(str(error), error))
                return error.code
            if number is None and isinstance(error, KeyboardInterrupt):
                number = error.signal_number if isinstance(error, Interrupted) else signals.SIGINT
            signals.answered()
            if number is None:
                if (code := _said(error)) is not None:
                    return code
                raise
            if isinstance(error, KeyboardInterrupt) or not signals.came_late():
                logger.info("%s", with_notes(f"stopped by {signals.name(number)}", error))
            else:
                error.add_note(f"then stopped by {signals.name(number)}")
                if _said(error) is None:
                    traceback.print_exception(error)
            return 128 + number


@contextlib.contextmanager
def logged_at(level: str) -> Iterator[None]:
    """Log gerl's messages from `level` (`logger.level`) on within the block."""
    before = logger.level
    logger.setLevel(level.upper())
    try:
        yield
    finally:
        logger.setLevel(before)


def watching(run_dir: Path) -> str:
    """Return the command that opens the page of a run, with the program `gerl` if it is on the PATH."""
    python = Path(sys.executable)
    if python.is_relative_to(Path.cwd()):
        python = python.relative_to(Path.cwd())
    installed = shutil.which("gerl")
    is_installed = installed is not None and Path(installed).parent == Path(sys.executable).parent
    program = "gerl watch" if is_installed else f"{python} -m gerl.watch"
    return f"{program} run={shlex.quote(str(run_dir))}"


def _said(error: BaseException) -> int | None:
    """Print the sentence of an error and return its exit code; None, without printing, for an unexpected error."""
    if isinstance(error, GerlError):
        sys.stderr.write(f"{with_notes(f'error: {error}', error)}\n")
        return 2 if isinstance(error, ConfigError) else 1
    if isinstance(error, SystemExit):  # raised by a scorer, for example: the command did not finish its work
        frames = traceback.extract_tb(error.__traceback__)
        where = f"{frames[-1].filename}, line {frames[-1].lineno}," if frames else "something"
        sys.stderr.write(f"{with_notes(f'error: {where} ended the process (SystemExit)', error)}\n")
        return 1
    return None


def with_notes(sentence: str, error: BaseException) -> str:
    """Return the sentence followed by the notes of the exception and of its causes, separated by semicolons."""
    notes = [note for cause in causes(error) for note in getattr(cause, "__notes__", [])]
    return "; ".join([sentence, *dict.fromkeys(notes)])


def make_folder(out: Path) -> None:
    """Create the output folder; raises `ConfigError` if that is not possible."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"out={out}: the folder cannot be created ({error.strerror}); choose another") from None
