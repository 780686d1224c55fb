"""What a user hears of a run: the messages of the log, and the warnings of Python."""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def heard() -> Iterator[Callable[[], list[str]]]:
    """A block whose messages the function that it gives returns, line by line."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.extend(record.getMessage().splitlines())  # type: ignore[method-assign]
    root, level = logging.getLogger(), logging.getLogger().level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        with warnings.catch_warnings(record=True) as warned:
            yield lambda: [*lines, *(str(w.message) for w in warned)]
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
