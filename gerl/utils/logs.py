"""What a worker's code says: its process has no log that a user reads, so it travels with an answer."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def caught(name: str, level: int) -> Iterator[list[str]]:
    """Collect what the loggers below `name` say from `level` on, in place of passing it on."""
    messages: list[str] = []
    logger, handler = logging.getLogger(name), logging.Handler(level)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]
