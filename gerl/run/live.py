"""Live view of a run: images of the latest steps, and the timeline of its workers."""

import contextlib
import io
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from gerl.timeline import DRIVER, Span
from gerl.utils.files import finite, write_file, writing
from gerl.web.pages import still

# --- `live/`: training images with their scores, one sheet for each of the latest and some earlier steps

FOLDER = "live"
WIDTH = 256  # pixels, the longer side of an image on the sheet
EXACT = 128  # pixels; smaller images are stored almost losslessly (PNG would take ten times as long)
KEPT = 2  # latest steps
MILESTONES = 24  # earlier steps, evenly spaced
MOST = 64  # images


@dataclass(frozen=True)
class LiveImage:
    """Image `index` of group `group` of a step, with its scores; None: not scored."""

    group: int
    index: int
    total: float | None
    scores: dict[str, float | None]
    advantage: float | None  # mean over the trained timesteps


def save_live(
    run_dir: Path, step: int, prompts: Sequence[str], images: Sequence[LiveImage], pixels: Sequence[np.ndarray], of: int
) -> None:
    """Write `live/step_N.json` and its sheet, and remove those of later and of most earlier steps.

    prompts: one per group. pixels: `[H, W, 3]` uint8, or videos, one per image. of: number of images of the step.
    Raises `GerlError` if they cannot be written.
    """
    tiles = [_small(still(image) if image.ndim == 4 else image) for image in pixels]
    width, height = max(tile.width for tile in tiles), max(tile.height for tile in tiles)
    columns = min(len(tiles), math.ceil(math.sqrt(len(tiles) * height / width)))
    sheet = Image.new("RGB", (columns * width, math.ceil(len(tiles) / columns) * height))
    for i, tile in enumerate(tiles):
        sheet.paste(tile, (i % columns * width, i // columns * height))
    buffer, exact = io.BytesIO(), max(width, height) <= EXACT
    sheet.save(buffer, "jpeg", quality=95 if exact else 85, subsampling=0 if exact else 2)
    path = run_dir / FOLDER / f"step_{step:06d}.json"
    shown = [[i.group, i.index, i.total, i.advantage, i.scores] for i in images]
    values: dict[str, Any] = {"step": step, "of": of, "prompts": list(prompts), "images": shown}
    values |= {"width": width, "height": height, "columns": columns}
    with writing(path):
        path.parent.mkdir(exist_ok=True)
    # the JSON is written last: if it exists, the sheet is complete
    write_file(path.with_suffix(".jpg"), buffer.getvalue())
    write_file(path, json.dumps(finite(values)))
    _thin(run_dir, step)


def live_steps(run_dir: Path) -> list[int]:
    """Return the steps with stored images, in order."""
    names = (re.fullmatch(r"step_(\d+)\.json", path.name) for path in (run_dir / FOLDER).glob("step_*.json"))
    return sorted(int(match[1]) for match in names if match)


def remove_live(run_dir: Path) -> None:
    """Remove the images of all steps."""
    _remove(run_dir, live_steps(run_dir))


def _thin(run_dir: Path, newest: int) -> None:
    """Keep the last `KEPT` steps and at most `MILESTONES` earlier ones; later ones precede a rollback or resume."""
    steps = live_steps(run_dir)
    earlier, spacing = [step for step in steps if step <= newest][:-KEPT], 1
    while newest // spacing > MILESTONES:
        spacing *= 2
    _remove(run_dir, [step for step in steps if step > newest] + [step for step in earlier if step % spacing])


def _remove(run_dir: Path, steps: Sequence[int]) -> None:
    for path in (run_dir / FOLDER / f"step_{step:06d}.{kind}" for step in steps for kind in ("json", "jpg")):
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def _small(image: np.ndarray) -> Image.Image:
    picture = Image.fromarray(np.ascontiguousarray(image))
    picture.thumbnail((WIDTH, WIDTH), Image.Resampling.BILINEAR, reducing_gap=2.0)
    return picture


# --- `timeline.jsonl`: a line per span of a worker (draw, score, update, validate, save, load)

TIMELINE = "timeline.jsonl"
Row = Mapping[str, Any]


def append_spans(run_dir: Path, spans: Sequence[Span]) -> None:
    """Append `spans`, with times rounded to 0.1 ms; raises `GerlError` if they cannot be written."""
    if not spans:
        return
    path = run_dir / TIMELINE
    rows = [span._asdict() | {"start": round(span.start, 4), "end": round(span.end, 4)} for span in spans]
    with writing(path), path.open("a", encoding="utf-8") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))


def read_spans(lines: Iterable[str]) -> list[Row]:
    """Parse spans; incomplete and other lines are skipped."""
    found = list[Row]()
    for line in lines:
        try:
            row = json.loads(line)
            names = {"worker": str(row["worker"]), "what": str(row["what"])}
            times = {"start": float(row["start"]), "end": float(row["end"])}
            found.append({**names, "step": int(row["step"]), **times})
        except (ValueError, KeyError, TypeError):
            continue
    return found


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
