"""Tests of a table's rows in one item, which lists all rows that fail."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from drills import ALL

Test = Callable[..., None]


def each(names: str | tuple[str, ...], rows: Iterable[Any], every: int = 1) -> Callable[[Test], Test]:
    """Run a test with each of `rows` as the arguments `names`; locally with one in `every`."""
    arguments = (names,) if isinstance(names, str) else names
    table = [(row,) if isinstance(names, str) else tuple(row) for row in rows][:: 1 if ALL else every]
    assert table, "the table has no rows"

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            offences = []
            for row in table:
                try:
                    test(**fixtures, **dict(zip(arguments, row, strict=True)))
                except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001 - every row is tried
                    offences.append(f"{', '.join(map(str, row))}: {type(error).__name__}: {error}")
            assert not offences, f"{len(offences)} of {len(table)} rows:\n" + "\n".join(offences)

        known = inspect.signature(test)
        left = [p for name, p in known.parameters.items() if name not in arguments]
        run.__signature__ = known.replace(parameters=left)  # type: ignore[attr-defined]
        return run

    return decorate
