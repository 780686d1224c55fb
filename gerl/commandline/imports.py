"""Large libraries, imported in less time."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """A block with imports, in which Python's cyclic garbage collector pauses.

    Imports make hundreds of thousands of objects that stay, and the collector would go through all of them again and
    again. After the block it leaves them out (`gc.freeze`).
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
