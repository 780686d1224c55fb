"""Read the files of a live run: images of the latest steps, held-out episodes, and the timeline of its workers."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gerl.config.bounded_text import MALFORMED, load_json
from gerl.progress import DRIVER

FOLDER = "live"
EPISODES = "validation"  # has `episode_N.json` and .jpg of validations with several turns


def live_steps(run_dir: Path) -> list[int]:
    """Return the steps with stored images, in order."""
    return _steps(run_dir / FOLDER, "step")


def episode_steps(run_dir: Path) -> list[int]:
    """Return the steps with a validation whose episodes are stored, in order."""
    return _steps(run_dir / EPISODES, "episode")


def _steps(folder: Path, name: str) -> list[int]:
    names = (re.fullmatch(rf"{name}_(\d+)\.json", path.name) for path in folder.glob(f"{name}_*.json"))
    return sorted(int(match[1]) for match in names if match)


# --- `timeline.jsonl`: a line per span of a worker (sample, score, update, validate, save, load)

TIMELINE = "timeline.jsonl"
Row = Mapping[str, Any]


def read_spans(lines: Iterable[str]) -> list[Row]:
    """Parse spans; incomplete and other lines are skipped."""
    spans = list[Row]()
    for line in lines:
        try:
            row = load_json(line)
            names = {"worker": str(row["worker"]), "what": str(row["what"])}
            times = {"start": float(row["start"]), "end": float(row["end"])}
            if all(map(math.isfinite, times.values())):
                spans.append({**names, "step": int(row["step"]), **times})
        except MALFORMED:
            continue
    return spans


def lanes(rows: Iterable[Row]) -> list[str]:
    """Return the workers of the spans: the driver, then the policy workers, then the scorers."""

    def order(name: str) -> tuple[int, str, int]:
        kind, _, number = name.rpartition(" ")
        rank = 0 if name == DRIVER else 1 if name.startswith("worker ") else 2
        return rank, kind, int(number) if number.isdigit() else 0

    return sorted({row["worker"] for row in rows}, key=order)


def chrome_trace(rows: Sequence[Row], title: str) -> dict[str, Any]:
    """Convert spans to the format of chrome://tracing and Perfetto: complete events, in microseconds."""
    names = lanes(rows)
    zero = min((row["start"] for row in rows), default=0.0)
    events: list[dict[str, Any]] = [{"ph": "M", "pid": 1, "name": "process_name", "args": {"name": f"gerl {title}"}}]
    for number, name in enumerate(names):
        events.append({"ph": "M", "pid": 1, "tid": number, "name": "thread_name", "args": {"name": name}})
        events.append({"ph": "M", "pid": 1, "tid": number, "name": "thread_sort_index", "args": {"sort_index": number}})
    for row in rows:
        place = {"pid": 1, "tid": names.index(row["worker"]), "cat": "gerl", "args": {"step": row["step"]}}
        times = {"ts": round((row["start"] - zero) * 1e6, 1), "dur": round((row["end"] - row["start"]) * 1e6, 1)}
        events.append({"ph": "X", "name": row["what"], **times, **place})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
