"""Metrics and images of a run: `metrics.jsonl`, `samples/`, and the run as described to trackers."""

import json
import math
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from gerl.config.bounded_text import LARGE, MALFORMED, load_json, read_log
from gerl.errors import GerlError
from gerl.utils.files import reason, write_file, writing

METRICS = "metrics.jsonl"
Rows = list[dict[str, Any]]
MOST_STEPS = 2**53  # above, floats skip integers
KINDS = (int, float, type(None)), (str,)  # of metrics, of the time


class MetricsLog:
    """Writer of the metrics and images of a run; the metrics of a step are logged in one call.

    start_step: the step that a resumed run continues from; rows of later steps and an incomplete last line are removed.
    Raises `GerlError` if the run folder cannot be written.
    """

    def __init__(self, run_dir: Path, start_step: int = 0) -> None:
        self.run_dir = run_dir
        self._path = run_dir / METRICS
        self._last_step = -1
        with writing(run_dir):
            run_dir.mkdir(parents=True, exist_ok=True)
            if self._path.exists():
                earlier = [row for row in read_metrics(self._path) if row["step"] <= start_step]
                write_file(self._path, "".join(json.dumps(row) + "\n" for row in earlier))
                self._last_step = max((row["step"] for row in earlier), default=-1)
            self._file = self._path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Append a row, `step` and `time` (ISO 8601, UTC) first; values that are not finite become null.

        Steps must increase. Raises `GerlError` if the row cannot be written or the file is gone.
        """
        if step <= self._last_step:
            raise ValueError(f"step {step} was logged after step {self._last_step}: merge the metrics of one step")
        self._last_step = step
        values = {name: float(value) for name, value in metrics.items()}
        time = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        with writing(self._path):
            self._file.write(json.dumps({"step": step, "time": time, **finite}) + "\n")
            self._file.flush()
        if not self._path.exists():  # writing to a deleted file does not fail
            raise GerlError(
                f"{self._path} is gone, with the metrics up to step {step}: the run folder was deleted or moved "
                "while the run wrote to it; start a new run, in a folder that stays"
            )

    def image(self, step: int, name: str, image: Image.Image) -> Path:
        """Save an image as `samples/{name}_{step:06d}.png`; returns its path."""
        path = self.run_dir / "samples" / f"{name}_{step:06d}.png"
        with writing(path):
            path.parent.mkdir(exist_ok=True)
            image.save(path)
        return path

    def close(self) -> None:
        """Close the file; may be called twice. Raises nothing while another error is being handled."""
        ending = sys.exception()
        try:
            with writing(self._path):
                self._file.close()
        except GerlError:
            if ending is None:
                raise


def parse_row(line: str | bytes) -> dict[str, Any] | None:
    """Parse a line of metrics: its `step`, `time`, and numbers, None for those that are not finite.

    Values of another kind are left out. Returns None for a damaged line, also one whose step is no integer.
    """
    try:
        values = load_json(line)
        row: dict[str, Any] = {
            name: value if value is None or type(value) is str or -LARGE <= value <= LARGE else None  # not NaN either
            for name, value in values.items()
            if type(value) in KINDS[name == "time"]
        }
        return row if type(row["step"]) is int and abs(row["step"]) < MOST_STEPS else None
    except MALFORMED:
        return None


def read_metrics(path: Path) -> Rows:
    """Read the rows of a `metrics.jsonl`, empty if it is missing.

    An incomplete last line is skipped; raises `GerlError` for any other damaged line.
    """
    try:
        lines = read_log(path)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise GerlError(f"{path} cannot be read: {reason(error)}") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        row = parse_row(line)
        if row is None:
            if number == len(lines):
                break
            raise GerlError(
                f"{path}, line {number}: expected a JSON object with a step, got {line[:60]!r}; remove the line"
            ) from None
        rows.append(row)
    return rows


def series(rows: Rows, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of the rows that have the metric `name`; null becomes NaN."""
    points = [(row["step"], row[name]) for row in rows if name in row]
    x = np.array([step for step, _ in points], dtype=float)
    y = np.array([v if isinstance(v, int | float) else np.nan for _, v in points], dtype=float)
    return x, y


def best_step(rows: Rows) -> tuple[int, float] | None:
    """The step with the highest held-out reward, the last one of equals; None with fewer than two measurements."""
    x, y = series(rows, "val/reward/mean")
    finite = [(float(value), int(step)) for step, value in zip(x, y, strict=True) if np.isfinite(value)]
    return max(finite)[::-1] if len(finite) > 1 else None
