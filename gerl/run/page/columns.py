"""The metrics of a run by column: read as they are written, and thinned out for a page."""

import json
import math
from array import array
from bisect import bisect_left
from pathlib import Path
from typing import Any

POINTS = 400  # of a curve; a longer one has the mean, the least and the greatest value of as many parts


class Columns:
    """`metrics.jsonl`, of which `read` takes in what is new."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.generation = 0  # rises when the file is another one: a resumed run cuts it
        self._clear()

    def _clear(self) -> None:
        self.last: dict[str, Any] = {}  # the last row
        self.values: dict[str, tuple[array[int], array[float]]] = {}  # name -> steps, values (NaN: null)
        self._read, self._file = 0, (0, 0)

    def read(self) -> None:
        """Take in the lines that were added; a last one that is half-written waits for the next time."""
        try:
            with self.path.open("rb") as file:
                status = self.path.stat()
                file_now = (status.st_ino, status.st_dev)
                if file_now != self._file or status.st_size < self._read:
                    if self._file != (0, 0):
                        self.generation += 1
                    self._clear()
                    self._file = file_now
                file.seek(self._read)
                text = file.read()
        except FileNotFoundError:
            return
        end = text.rfind(b"\n") + 1
        self._read += end
        for line in text[:end].splitlines():
            self._add(line)

    def _add(self, line: bytes) -> None:
        try:
            row = json.loads(line)
            step = int(row["step"])
        except (ValueError, KeyError, TypeError):
            return
        if step <= self.last.get("step", -1):
            return
        self.last = row
        for name, value in row.items():
            if name == "step" or isinstance(value, str | bool | list | dict):
                continue
            steps, values = self.values.setdefault(name, (array("q"), array("d")))
            steps.append(step)
            values.append(math.nan if value is None else float(value))

    def series(self, name: str, since: int, width: int) -> dict[str, Any] | None:
        """The curve of a metric from step `since` on, in parts of `width` steps; None if there is none.

        `x`: the first step of each part; `y` its mean; `low` and `high`, where `width` is more than 1.
        """
        if name not in self.values:
            return None
        steps, values = self.values[name]
        i = bisect_left(steps, since // width * width)
        if width == 1:
            return {"x": steps[i:].tolist(), "y": [_short(value) for value in values[i:]]}
        found: dict[str, list[Any]] = {"x": [], "y": [], "low": [], "high": []}
        while i < len(steps):
            part = steps[i] // width
            end = bisect_left(steps, (part + 1) * width, i)
            known = [value for value in values[i:end] if math.isfinite(value)]
            found["x"].append(part * width)
            found["y"].append(_short(math.fsum(known) / len(known)) if known else None)
            found["low"].append(_short(min(known)) if known else None)
            found["high"].append(_short(max(known)) if known else None)
            i = end
        return found

    def width(self) -> int:
        """Steps that a part of the curves has, so that there are at most `POINTS` parts: a power of two."""
        width = 1
        while self.last.get("step", 0) >= POINTS * width:
            width *= 2
        return width

    def latest(self, name: str, count: int = 1) -> float | None:
        """The mean of the last `count` values of a metric, None where there are none."""
        _, values = self.values.get(name, (None, array("d")))
        known = [value for value in values[-count:] if math.isfinite(value)]
        return math.fsum(known) / len(known) if known else None


def _short(value: float) -> float | None:
    """A number with five digits, as JSON has it."""
    return float(f"{value:.5g}") if math.isfinite(value) else None
