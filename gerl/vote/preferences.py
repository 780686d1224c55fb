"""Votes as a preference file: `preferences.parquet`, or `.jsonl` without pyarrow; the schema is in docs/vote.md."""

import importlib.util
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gerl.utils.files import write_file

STEM = "preferences"


@dataclass(frozen=True, kw_only=True)
class Preference:
    """A vote on a group of N images: `ranks` [N] from 1 for the best, ties share one; skipped: all 1.

    images: [N] PNGs, relative to the file's folder; sources: likewise, of the pictures that the prompt comes with.
    time: seconds since 1970. used: the run has learned from it.
    """

    run: str
    step: int
    prompt_id: int
    prompt: str
    images: list[str]
    sources: list[str]
    seeds: list[int]
    ranks: list[int]
    voter: str
    time: float
    used: bool


def write_preferences(folder: Path, rows: Sequence[Preference]) -> Path | None:
    """Write all votes, complete or not at all; the file, None without votes. Raises `GerlError` if it cannot."""
    if not rows:
        return None
    values = [asdict(row) for row in rows]
    if importlib.util.find_spec("pyarrow") is None:
        path = folder / f"{STEM}.jsonl"
        write_file(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in values))
        return path
    path = folder / f"{STEM}.parquet"
    write_file(path, _parquet(values))
    return path


def _parquet(values: list[dict[str, Any]]) -> bytes:
    import pyarrow
    import pyarrow.parquet

    schema = pyarrow.schema(
        {
            "run": pyarrow.string(),
            "step": pyarrow.int64(),
            "prompt_id": pyarrow.int64(),
            "prompt": pyarrow.string(),
            "images": pyarrow.list_(pyarrow.string()),
            "sources": pyarrow.list_(pyarrow.string()),
            "seeds": pyarrow.list_(pyarrow.int64()),
            "ranks": pyarrow.list_(pyarrow.int64()),
            "voter": pyarrow.string(),
            "time": pyarrow.timestamp("us", tz="UTC"),
            "used": pyarrow.bool_(),
        }
    )
    rows = [{**row, "time": round(row["time"] * 1e6)} for row in values]
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema=schema), buffer)
    return buffer.getvalue()
