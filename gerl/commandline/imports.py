"""Large libraries, imported in less time."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """A block with imports, in which no cyclic garbage is looked for.

    Imports make hundreds of thousands of objects that stay: to look through all of them again and again takes a fifth
    of the time. Later searches leave out those that are there in the end.
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
