"""A row of the tables of wrong command lines."""

from dataclasses import dataclass, field
from typing import Any

import pytest


@dataclass(frozen=True)
class Row:
    """A command line, its exit code (None: any but 0), what is named, and below that the pattern of the remedy.

    works: it is no error after all, and `named` and `remedy` are of the log. loads: a model is loaded.
    """

    line: str
    named: str
    remedy: str = ""
    code: int | None = 2
    works: bool = False
    loads: bool = False
    environment: dict[str, str] = field(default_factory=dict)


def row(name: str, line: str, named: str, remedy: str = "", code: int | None = 2, **more: Any) -> Any:
    """A parameter of the test."""
    return pytest.param(Row(line, named, remedy, code, **more), id=name)
