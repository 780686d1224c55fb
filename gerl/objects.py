"""Python objects that a configuration, which is text, refers to by name: reward functions and a pipeline in memory."""

import contextlib
from collections.abc import Callable, Iterator, Mapping

PREFIX = "python:"  # of the name of a function, where a scorer would have its file
Function = Callable[..., object]

_functions: dict[str, Function] = {}
_pipelines: dict[str, object] = {}


@contextlib.contextmanager
def offered(functions: Mapping[str, Function], pipelines: Mapping[str, object]) -> Iterator[None]:
    """Register `functions` and `pipelines` by name during the block; those of other runs stay registered."""
    before = dict(_functions), dict(_pipelines)
    _functions.update(functions)
    _pipelines.update(pipelines)
    try:
        yield
    finally:
        _functions.clear()
        _pipelines.clear()
        _functions.update(before[0])
        _pipelines.update(before[1])


def function(path: str) -> Function | None:
    """The function of a scorer's `path`; None if it is not registered here."""
    return _functions.get(path.removeprefix(PREFIX))


def pipeline(path: str) -> object | None:
    """The pipeline in memory for `path`, if there is one."""
    return _pipelines.get(path)


def offer(functions: Mapping[str, Function]) -> None:
    """Register `functions` for the life of this process, which was started for scorers."""
    _functions.update(functions)
