"""Log records of a worker as values: nobody reads the log of its process, so they travel with its answers."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def pass_on_logs(name: str, level: int, say: Callable[[str], None]) -> None:
    """Hand the messages that the loggers below `name` give from `level` on to `say`, as long as this process lives."""
    logger, handler = logging.getLogger(name), logging.Handler(level)
    handler.emit = lambda record: say(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(level)


@contextmanager
def capture_logs(name: str, level: int) -> Iterator[list[str]]:
    """Collect the messages that the loggers below `name` give from `level` on, instead of passing them on."""
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
