"""The table of a sweep, from what its runs have written so far: `sweep.csv`, `sweep.json`, and on the screen."""

import json
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gerl.commandline.waiting import duration
from gerl.errors import GerlError
from gerl.run.card import CARD, read_sessions
from gerl.run.session import METRICS
from gerl.run.tracking import read_metrics
from gerl.utils.files import csv_text, write_file

JOB = "job.json"  # in the folder of a run: its number in the sweep, its overrides, how it ended
HELD_OUT, TRAINED = "val/reward/mean", "reward/mean"
Job = dict[str, Any]


def read_jobs(folder: Path) -> list[Job]:
    """The runs of a sweep that were begun, by their numbers."""
    paths = folder.glob(f"*/{JOB}")
    jobs = [{**json.loads(path.read_text(encoding="utf-8")), "folder": str(path.parent)} for path in paths]
    return sorted(jobs, key=lambda job: int(job["number"]))


def result(run_dir: Path) -> dict[str, Any]:
    """final, best and best_step of the held-out reward of a run, or of the reward where nothing is held out.

    None where nothing was measured.
    """
    try:
        rows = read_metrics(run_dir / METRICS)
    except GerlError:  # a damaged file must not hide the other runs
        rows = []
    found: dict[str, list[tuple[float, int]]] = {HELD_OUT: [], TRAINED: []}
    for name, values in found.items():
        known = ((row.get(name), row["step"]) for row in rows)
        values += [(float(v), step) for v, step in known if isinstance(v, int | float) and math.isfinite(v)]
    measured = found[HELD_OUT] or found[TRAINED]
    best, step = max(measured, default=(None, None))
    return {"final": measured[-1][0] if measured else None, "best": best, "best_step": step}


def write_table(folder: Path) -> None:
    """Write `sweep.csv` and `sweep.json` into the folder of a sweep."""
    jobs = read_jobs(folder)
    rows = [_row(job) for job in jobs]
    columns = ["number", *_varied(jobs), "final", "best", "best_step", "end", "seconds", "folder"]
    csv = csv_text(columns, [{column: row.get(column) for column in columns} for row in rows])
    write_file(folder / "sweep.csv", csv)
    whole = [
        {**{k: v for k, v in row.items() if k in columns}, "overrides": job["overrides"]}
        for row, job in zip(rows, jobs, strict=True)
    ]
    write_file(folder / "sweep.json", json.dumps({"runs": whole}, indent=2) + "\n")


def table(jobs: Sequence[Job]) -> str:
    """The runs of a sweep in lines of equal columns, for a terminal."""
    varied = _varied(jobs)
    lines = [["", *varied, "final", "best", "at step", "time", "end"]]
    for row in map(_row, jobs):
        numbers = ["" if row[name] is None else f"{row[name]:.3f}" for name in ("final", "best")]
        step = "" if row["best_step"] is None else str(row["best_step"])
        took = duration(row["seconds"]) if row["seconds"] is not None else ""
        lines.append(
            [
                str(row["number"]),
                *(str(row.get(key, "")) for key in varied),
                *numbers,
                step,
                took,
                textwrap.shorten(row["end"], 60, placeholder=" ..."),
            ]
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _varied(jobs: Sequence[Job]) -> list[str]:
    """The keys that were swept over."""
    return list(dict.fromkeys(key for job in jobs for key in _given(job)))


def _given(job: Job) -> dict[str, str]:
    pairs = (override.partition("=") for override in job["swept"])
    return {name.lstrip("+"): value for name, _, value in pairs}


def _row(job: Job) -> dict[str, Any]:
    """The columns of a run, with a column for each key that was swept over."""
    folder, code = Path(job["folder"]), job["code"]
    sessions = read_sessions(folder / CARD)
    error = sessions[-1].get("error") if sessions and code else None
    end = "unfinished" if code is None else "finished" if code == 0 else error or f"exit code {code}"
    own = {"number": job["number"], "end": end, "seconds": job.get("seconds"), "folder": job["folder"]}
    return {**_given(job), **result(folder), **own}
