"""Faster imports of large libraries."""

import contextlib
import functools
import gc
import importlib.metadata
import threading
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module

Packages = Mapping[str, list[str]]


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Pause Python's cyclic garbage collector during a block of imports, which makes them faster.

    It would traverse hundreds of thousands of permanent objects again and again; they are frozen after the block.
    diffusers asks on import which distribution each package is from, which is computed on first use.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    find = importlib.metadata.packages_distributions
    importlib.metadata.packages_distributions = lambda: WhenRead(find)
    try:
        yield
    finally:
        importlib.metadata.packages_distributions = find
        gc.freeze()
        gc.enable()


@contextlib.contextmanager
def imported_meanwhile(module: str) -> Iterator[None]:
    """Import `module` in a thread during a block that waits for other processes; errors are left to a later import.

    A block that fails does not wait for the thread.
    """

    def run() -> None:
        with contextlib.suppress(Exception):
            import_module(module)

    thread = threading.Thread(target=run, name=f"import {module}")
    thread.start()
    yield
    thread.join()


class WhenRead(UserDict[str, list[str]]):
    """A mapping of packages to their distributions, computed on first use because `find` reads many files."""

    def __init__(self, find: Callable[[], Packages]) -> None:
        self._find = find

    @functools.cached_property
    def data(self) -> Packages:  # type: ignore[override]
        return self._find()
