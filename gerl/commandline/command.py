"""The frame of every command line of gerl: help, log, signals, exit codes, output folder."""

import logging
import shlex
import shutil
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from gerl.commandline import signals
from gerl.commandline.imports import importing
from gerl.errors import ConfigError, GerlError, Interrupted, Stopped

logger = logging.getLogger("gerl")
PAGE = 8765  # the port of the page of `gerl watch`, unless it is taken
WITH_LEVELS = "%(levelname)s %(name)s: %(message)s"  # the log of a service


def run_command(
    argv: Sequence[str] | None,
    help_text: Callable[[], str],
    work: Callable[[list[str]], object],
    logger: logging.Logger = logger,
    log_format: str = "%(message)s",
) -> int:
    """Run `work` on the arguments (None: those of the process) and return the exit code.

    0; 1 for an error, 2 for a wrong configuration, both said in one sentence; 128 + the number of a signal. logger: the
    one whose info is shown. Whatever an exception has for notes (the checkpoint that was saved) is said with it.
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
    module: str,
    log_format: str = "%(message)s",
    arguments: Sequence[str] | None = None,
    program: str | None = None,
) -> int:
    """Import the `module` of a command and return what its `main` does; signals are heard while it is imported.

    arguments: None: those of the process. program: the words that started the command, if not those of its help.
    """
    logging.basicConfig(level=logging.WARNING, format=log_format)

    def work() -> int:
        with importing():
            command = import_module(module)
        return int(command.main(arguments) if program is None else command.main(arguments, program))

    return _ended(work, logger)


def _ended(work: Callable[[], int], logger: logging.Logger) -> int:
    """The exit code of `work`, or that of the exception that ends it, after its sentence.

    A signal decides the exit code also where it came after an error, whose sentence is then said with it.
    """
    logger.setLevel(logging.INFO)
    with signals.handled():
        try:
            return work()
        except BaseException as error:
            # Ray, and others with C code, turn an interruption into an exception of their own: the signal counts
            number = signals.received()
            if number is None and isinstance(error, Stopped):
                logger.info("%s", with_notes(str(error), error))
                return 0
            if number is None and isinstance(error, KeyboardInterrupt):
                number = error.signal_number if isinstance(error, Interrupted) else signals.SIGINT
            signals.answered()
            if number is None:
                code = _said(error)
                if code is None:
                    raise
                return code
            if isinstance(error, KeyboardInterrupt) or not signals.came_late():
                logger.info("%s", with_notes(f"stopped by {signals.name(number)}", error))
            else:
                error.add_note(f"then stopped by {signals.name(number)}")
                if _said(error) is None:
                    traceback.print_exception(error)
            return 128 + number


def watching(run_dir: Path) -> str:
    """The command line that opens the page of a run, by the program `gerl` where the shell finds it."""
    python = Path(sys.executable)
    if python.is_relative_to(Path.cwd()):
        python = python.relative_to(Path.cwd())
    found = shutil.which("gerl")
    own = found is not None and Path(found).parent == Path(sys.executable).parent
    program = "gerl watch" if own else f"{python} -m gerl.watch"
    return f"{program} run={shlex.quote(str(run_dir))}"


def _said(error: BaseException) -> int | None:
    """Write the sentence of an error and return its exit code; None, after writing nothing, where it has none."""
    if isinstance(error, GerlError):
        sys.stderr.write(f"{with_notes(f'error: {error}', error)}\n")
        return 2 if isinstance(error, ConfigError) else 1
    if isinstance(error, SystemExit):  # of a scorer, say: the command has not done what it was asked for
        sys.stderr.write(f"{with_notes(f'error: {_where(error)} ended the process (SystemExit)', error)}\n")
        return 1
    return None


def with_notes(sentence: str, error: BaseException) -> str:
    """The sentence and, behind semicolons, the notes of the exception and of those it came from."""
    notes = list[str]()
    seen: BaseException | None = error
    while seen is not None:
        notes += [note for note in getattr(seen, "__notes__", []) if note not in notes]
        seen = seen.__cause__ or seen.__context__
    return "; ".join([sentence, *notes])


def _where(error: BaseException) -> str:
    """File and line of the last frame of an exception."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f"{trace.tb_frame.f_code.co_filename}, line {trace.tb_lineno}," if trace else "something"


def make_folder(out: Path) -> None:
    """Create the output folder; raises `ConfigError` if that is not possible."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"out={out}: the folder cannot be created ({error.strerror}); choose another") from None
