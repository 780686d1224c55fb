"""A run in its folder from start to end: its log, its card, and the commands that it is given meanwhile."""

import contextlib
import logging
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Literal

from gerl.errors import GerlError, Interrupted
from gerl.run.card import Card, End, now, redact
from gerl.run.checkpoint import checkpoint_paths
from gerl.utils.files import reason, writing

# --- `log.txt` of a run folder: everything that the console logged, with times and levels, and tracebacks besides

LOG = "log.txt"
LIBRARIES = ("diffusers", "transformers", "huggingface_hub")  # their loggers do not pass on what they show
EARLY = 10_000  # records kept until there is a folder


class RunLog:
    """While entered, log records and Python's warnings are kept; from `open` on they go to `log.txt`, appended.

    Times are UTC. Secrets are left out. A record that cannot be written is dropped: what else the run writes to its
    folder says so.
    """

    def __init__(self) -> None:
        self._handler: logging.Handler = MemoryHandler(EARLY, flushLevel=logging.CRITICAL + 1, flushOnClose=False)
        self._loggers: list[logging.Logger] = []

    def __enter__(self) -> "RunLog":
        logging.captureWarnings(True)
        libraries = [logging.getLogger(name) for name in LIBRARIES]
        self._loggers = [logging.getLogger(), *(logger for logger in libraries if not logger.propagate)]
        for logger in self._loggers:
            logger.addHandler(self._handler)
        return self

    def __exit__(self, *_: object) -> None:
        logging.captureWarnings(False)
        for logger in self._loggers:
            logger.removeHandler(self._handler)
        self._handler.close()

    def open(self, folder: Path) -> None:
        """Write to `folder/log.txt`, first what was logged so far; raises `GerlError` if that is not possible."""
        with writing(folder / LOG):
            file = _File(folder / LOG, encoding="utf-8")
        file.setFormatter(_Lines("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        early, self._handler = self._handler, file
        for logger in self._loggers:
            logger.addHandler(file)
            logger.removeHandler(early)
        for record in early.buffer if isinstance(early, MemoryHandler) else []:
            file.handle(record)

    def failure(self, error: BaseException) -> None:
        """Note the error that ends the run, with its traceback; the console has its sentence."""
        found = (type(error), error, error.__traceback__)
        self._handler.handle(logging.LogRecord("gerl", logging.ERROR, __file__, 0, "the run ends: %s", (error,), found))


class _Lines(logging.Formatter):
    converter = time.gmtime  # type: ignore[assignment]  # the time zone of all that a run writes
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


class _File(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """Pass over a record that cannot be written; the way of `logging` is a traceback on the console for each."""

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the records that could not be written
            super().close()


# --- A run in its folder from start to end: its log, its card, and no folder where nothing came of it

logger = logging.getLogger("gerl")
METRICS = "metrics.jsonl"
VOTES = "votes"  # the folder of what people said, which nobody can compute again
STOPS = Interrupted | KeyboardInterrupt | GeneratorExit  # a program that asks for no further step


@contextlib.contextmanager
def session(run_dir: Path, log: RunLog, arguments: Sequence[str], workers: str) -> Iterator[Callable[[], None]]:
    """Keep log and card in the folder, from when the block calls what is yielded until it ends.

    The block calls it once the folder is there and the run may write into it: one that is refused leaves no trace. The
    log then has what was logged before, and the card when the block began. A folder that was made in the block goes
    again if the block ends by an error before the first metrics, checkpoint or vote.
    """
    missing = [folder for folder in (run_dir, *run_dir.absolute().parents) if not folder.exists()]
    how: End = "error"
    why: BaseException | None = None
    card: Card | None = None
    started = now()

    def begin() -> None:
        nonlocal card
        # Not sooner, so a resumed run that fails while it is loaded writes none: the folder is as the run before left
        # it, and may have nothing wrong with it. The console has the error, with its traceback if there is no sentence.
        log.open(run_dir)
        card = Card(run_dir, arguments, workers, started)

    try:
        yield begin
        how = "finished"
    except BaseException as error:
        how, why = "interrupted" if isinstance(error, STOPS) else "error", error
        log.failure(error)
        raise
    finally:
        if why is not None and run_dir in missing and not has_results(run_dir) and not (run_dir / VOTES).exists():
            remove(missing)
            if card is not None:
                logger.info("the run produced nothing: its folder %s is removed", run_dir)
        elif card is not None and run_dir.is_dir():
            _complete(card, how, why)


def has_results(run_dir: Path) -> bool:
    """Whether a line of metrics or a checkpoint was written."""
    metrics = run_dir / METRICS
    return (metrics.is_file() and metrics.stat().st_size > 0) or bool(checkpoint_paths(run_dir / "checkpoints"))


def remove(made: Sequence[Path]) -> None:
    """Delete the run folder, the first of the folders that were `made` for it, and those above it that are empty."""
    run_dir, *above = made
    try:
        shutil.rmtree(run_dir)
        for folder in above:
            folder.rmdir()
    except OSError as error:  # another run may have put its folder beside it
        logger.debug("%s is kept: %s", run_dir, reason(error))


def _complete(card: Card, how: End, why: BaseException | None) -> None:
    try:
        card.end(how, why)
    except GerlError as error:
        if why is None:
            raise
        logger.warning("%s", error)  # the first cause is the one that is raised


# --- Commands for a run that trains: files in `control/` of its folder, which the run looks for between steps

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
