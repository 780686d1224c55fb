"""Large libraries, imported in less time."""

import contextlib
import functools
import gc
import importlib.metadata
from collections.abc import Callable, Iterator, Mapping

Packages = Mapping[str, list[str]]


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """A block with imports, in which Python's cyclic garbage collector pauses.

    Imports make hundreds of thousands of objects that stay, and the collector would go through all of them again and
    again. After the block it leaves them out (`gc.freeze`). diffusers, as it is imported, asks which distribution each
    installed package is from, and seldom uses the answer: it is found when it is first read.
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


class WhenRead(Packages):
    """The distributions that each package is from, by `find`, which reads the list of files of every distribution."""

    def __init__(self, find: Callable[[], Packages]) -> None:
        self._found = functools.cache(find)

    def __getitem__(self, package: str) -> list[str]:
        return self._found()[package]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found())

    def __len__(self) -> int:
        return len(self._found())
