"""Objects of the program that started a run, in place of what a configuration names: rewards, and a pipeline.

A configuration is text, which a function or a pipeline in memory is not. So it has a name for each, and this process
knows which object that means while the run lasts. Functions go along to the processes of scorers.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping

PREFIX = "python:"  # of the name of a function, where a scorer would have its file
Function = Callable[..., object]

_functions: dict[str, Function] = {}
_pipelines: dict[str, object] = {}


@contextlib.contextmanager
def offered(functions: Mapping[str, Function], pipelines: Mapping[str, object]) -> Iterator[None]:
    """While the block lasts, `functions` stand for `PREFIX` and their names, and `pipelines` for values of model.path.

    What other runs of this process offer stays.
    """
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
    """The function that a scorer's `path` means; None if it is not offered here."""
    return _functions.get(path.removeprefix(PREFIX))


def pipeline(path: str) -> object | None:
    """The pipeline in memory that stands for the one of `path`, if there is one."""
    return _pipelines.get(path)


def offer(functions: Mapping[str, Function]) -> None:
    """Offer `functions` as long as this process lives: one that was started for scorers."""
    _functions.update(functions)
