"""A run in its folder: its log, its card, and the commands it receives."""

import contextlib
import logging
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from logging.handlers import MemoryHandler
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from gerl.errors import GerlError, Interrupted
from gerl.run.card import Card, End, now, redact
from gerl.run.checkpoint import checkpoint_paths
from gerl.utils.files import reason, writing

LOG = "log.txt"
LIBRARIES = ("diffusers", "transformers", "huggingface_hub")  # their loggers do not propagate
EARLY = 10_000  # records buffered until the folder exists


class RunLog:
    """Context that buffers log records and Python's warnings, and appends them to `log.txt` from `open` on.

    Times are UTC; secrets are redacted. A record that cannot be written is dropped: other files of the run then fail
    with a message.
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
        """Write the buffered and all further records to `folder/log.txt`; raises `GerlError` if that fails."""
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
        """Log the error that ends the run with its traceback; the console shows its sentence."""
        exception = (type(error), error, error.__traceback__)
        self._handler.handle(
            logging.LogRecord("gerl", logging.ERROR, __file__, 0, "the run ends: %s", (error,), exception)
        )


class _Lines(logging.Formatter):
    converter = time.gmtime  # type: ignore[assignment]  # UTC, as in all files of a run
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


class _File(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """Drop a record that cannot be written, without the traceback that `logging` prints."""

    def close(self) -> None:
        with contextlib.suppress(OSError):  # records that could not be written
            super().close()


# --- The folder of a run: its log and card, removed again if the run produced nothing

logger = logging.getLogger("gerl")
METRICS = "metrics.jsonl"
VOTES = "votes"  # folder of people's votes, which cannot be computed again
STOPS = Interrupted | KeyboardInterrupt | GeneratorExit  # GeneratorExit: a program that asks for no further step


@contextlib.contextmanager
def session(
    run_dir: Path,
    log: RunLog,
    arguments: Sequence[str],
    workers: str,
    facts: Mapping[str, object] = MappingProxyType({}),
) -> Iterator[Callable[[], None]]:
    """Keep log and card in the folder, from the call of the yielded function to the end of the block.

    The block calls it once the folder exists and the run may write into it: a refused run leaves no trace. Log and card
    then include the time since the block began. A folder made in the block is removed if the block fails before the
    first metrics, checkpoint or vote. `facts`: see `Card`.
    """
    missing = [folder for folder in (run_dir, *run_dir.absolute().parents) if not folder.exists()]
    how: End = "error"
    why: BaseException | None = None
    card: Card | None = None
    started = now()

    def begin() -> None:
        nonlocal card
        # not sooner: a resumed run that fails to load leaves the folder as it was
        log.open(run_dir)
        card = Card(run_dir, arguments, workers, started, facts)

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
            try:
                card.end(how, why)
            except GerlError as error:
                if why is None:
                    raise
                logger.warning("%s", error)  # the first error is raised


def has_results(run_dir: Path) -> bool:
    """Whether a row of metrics or a checkpoint was written."""
    metrics = run_dir / METRICS
    return (metrics.is_file() and metrics.stat().st_size > 0) or bool(checkpoint_paths(run_dir / "checkpoints"))


def remove(made: Sequence[Path]) -> None:
    """Delete the run folder, the first of the folders `made` for it, and the empty ones above it."""
    run_dir, *above = made
    try:
        shutil.rmtree(run_dir)
        for folder in above:
            folder.rmdir()
    except OSError as error:  # another run may have put its folder beside it
        logger.debug("%s is kept: %s", run_dir, reason(error))


# --- Commands for a running run: files in `control/` of its folder, checked between steps

Command = Literal["save", "validate", "stop"]
COMMANDS: tuple[Command, ...] = ("save", "validate", "stop")
FOLDER = "control"


def ask(run_dir: Path, command: Command) -> None:
    """Request a checkpoint, a validation, or a stop after the step; raises `GerlError` if it cannot be written."""
    path = run_dir / FOLDER / command
    with writing(path):
        path.parent.mkdir(exist_ok=True)
        path.touch()


def asked(run_dir: Path) -> list[Command]:
    """Return the pending commands."""
    return [command for command in COMMANDS if (run_dir / FOLDER / command).exists()]


def take(run_dir: Path, command: Command) -> bool:
    """Consume a command; returns whether it was pending."""
    try:
        (run_dir / FOLDER / command).unlink()
    except OSError:  # not requested, the usual case
        return False
    return True


def clear(run_dir: Path) -> None:
    """Remove the pending commands and the folder."""
    for command in COMMANDS:
        take(run_dir, command)
    with contextlib.suppress(OSError):
        (run_dir / FOLDER).rmdir()
