"""Findings of the checks of a run: what agrees, what does not, by file, step and key, and what could not be checked."""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["ok", "failed", "not checked"]
SHOWN = 5  # numbers that are named of a failed check
LONG = 80  # characters of a reason that is not repeated

DAMAGED = "damaged"  # a file that cannot be read or has changed: what was found says it whole


class NotCheckedError(Exception):
    """A check cannot be made; the message says why."""


@dataclass(frozen=True)
class Wrong:
    """A recorded value of a file that is not what follows from the rest of the run, `by` which it was found."""

    file: str
    key: str
    recorded: Any
    found: Any  # the key of the written file
    step: int | None = None
    by: str = "recomputed"

    def __str__(self) -> str:
        if self.by == DAMAGED:
            return f"{self.file}: {self.found}"
        at = "" if self.step is None else f", step {self.step}"
        return f"{self.file}{at}: {self.key} is {shown(self.recorded)}, and {shown(self.found)} {self.by}"


@dataclass(frozen=True)
class Check:
    """Result of a check: `text` says what agrees, or why it was not checked."""

    name: str
    status: Status
    text: str
    wrong: list[Wrong] = field(default_factory=list)


@dataclass
class Tally:
    """Comparison of many values: how many, and which differ."""

    count: int = 0
    wrong: list[Wrong] = field(default_factory=list)
    apart: float = 0.0  # largest difference that was accepted

    def compare(
        self,
        file: str,
        key: str,
        recorded: Any,
        actual: Any,
        step: int | None = None,
        by: str = "recomputed",
        tolerance: float = 0.0,
    ) -> None:
        """Compare two values; numbers may differ by `tolerance`, relative to the larger one or to 0.01."""
        self.count += 1
        if (difference := apart(recorded, actual)) > tolerance:
            self.wrong.append(Wrong(file, key, recorded, actual, step, by))
        else:
            self.apart = max(self.apart, difference)

    def result(self, name: str, what: str) -> Check:
        """Return the result of the check `name`; `what` was compared."""
        if not self.count:
            return Check(name, "not checked", f"there is nothing to compare: {what}")
        if self.wrong:
            return Check(name, "failed", f"{len(self.wrong)} of {self.count} differ: {what}", self.wrong)
        near = f", up to {self.apart:.0e}" if self.apart else ""
        return Check(name, "ok", f"{what}{near}")


def apart(recorded: Any, actual: Any) -> float:
    """Return the difference of two values: 0 if equal, relative for numbers, else infinite."""
    numbers = [isinstance(value, int | float) and not isinstance(value, bool) for value in (recorded, actual)]
    if not all(numbers):
        return 0.0 if recorded == actual else math.inf
    if recorded == actual or (math.isnan(recorded) and math.isnan(actual)):
        return 0.0
    difference = abs(recorded - actual) / max(abs(recorded), abs(actual), 0.01)
    return difference if math.isfinite(difference) else math.inf


def shown(value: Any) -> str:
    """Format a value for a sentence."""
    return repr(value) if isinstance(value, float) else f"{value}"[:200]


def table(checks: Sequence[Check], width: int = 110) -> str:
    """Return the checks as text: name, status and what agrees, and below it the values that differ."""
    name = max(len(check.name) for check in checks) + 2
    lines, first_with = list[str](), dict[str, str]()  # long reasons -> the check that has them first
    for check in checks:
        more = len(check.wrong) - SHOWN
        below = [*map(str, check.wrong[:SHOWN]), *([f"and {more} more"] if more > 0 else [])]
        first = f"{check.name:<{name}}{check.status:<13}"
        same = first_with.setdefault(check.text, check.name) if len(check.text) > LONG else check.name
        reason = check.text if same == check.name else f"as {same}"
        for text, start in ((reason, first), *((text, f"{'':<{name}}- ") for text in below)):
            lines.append(textwrap.fill(text, width, initial_indent=start, subsequent_indent=" " * len(start)))
    return "\n".join(lines)
