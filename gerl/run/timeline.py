"""`timeline.jsonl` of a run: a line for each span that a worker drew, scored, trained, validated, saved or loaded."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gerl.timeline import DRIVER, Span
from gerl.utils.files import writing

TIMELINE = "timeline.jsonl"
Row = Mapping[str, Any]


def append_spans(run_dir: Path, spans: Sequence[Span]) -> None:
    """Add `spans` to the file, times to the tenth of a millisecond; raises `GerlError` if it cannot be written."""
    if not spans:
        return
    path = run_dir / TIMELINE
    rows = [span._asdict() | {"start": round(span.start, 4), "end": round(span.end, 4)} for span in spans]
    with writing(path), path.open("a", encoding="utf-8") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))


def read_spans(lines: Iterable[str]) -> list[Row]:
    """The spans in `lines`; one that is half-written, or no span, is passed over."""
    found = list[Row]()
    for line in lines:
        try:
            row = json.loads(line)
            numbers = float(row["start"]), float(row["end"]), int(row["step"])
            found.append({"worker": str(row["worker"]), "what": str(row["what"])} | _times(numbers))
        except (ValueError, KeyError, TypeError):
            continue
    return found


def _times(numbers: tuple[float, float, int]) -> dict[str, float]:
    start, end, step = numbers
    return {"step": step, "start": start, "end": end}


def lanes(rows: Iterable[Row]) -> list[str]:
    """The workers of spans: the run as a whole, then those that draw and train, then the scorers."""
    return sorted({row["worker"] for row in rows}, key=_order)


def _order(name: str) -> tuple[int, str, int]:
    kind, _, number = name.rpartition(" ")
    rank = 0 if name == DRIVER else 1 if name.startswith("worker ") else 2
    return rank, kind, int(number) if number.isdigit() else 0


def chrome_trace(rows: Sequence[Row], title: str) -> dict[str, Any]:
    """The spans in the format that chrome://tracing and Perfetto open: complete events, in microseconds."""
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
