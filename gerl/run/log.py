"""`log.txt` of a run folder: everything that the console logged, with times and levels, and tracebacks besides."""

import contextlib
import logging
import time
from logging.handlers import MemoryHandler
from pathlib import Path

from gerl.run.redaction import redact
from gerl.utils.files import writing

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
