"""Starts the ranks of a worker as processes, `tests/sharded_ranks.py`, and collects what they say."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# what is freed goes back to the system, so that its memory can be measured
SETTINGS = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def run_ranks(folder: Path, count: int, *arguments: str) -> list[list[dict[str, Any]]]:
    """The rows of each of `count` ranks, which meet in `folder`."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    command = [sys.executable, "-W", "ignore", "-m", "sharded_ranks"]
    processes = [
        subprocess.Popen([*command, str(rank), str(count), str(folder / "store"), *arguments], text=True,
                         env={**os.environ, **SETTINGS, "PYTHONPATH": path},
                         stdout=subprocess.PIPE, stderr=(folder / f"log{rank}").open("w"))
        for rank in range(count)
    ]  # fmt: skip
    rows = []
    for rank, process in enumerate(processes):
        out, _ = process.communicate(timeout=1200)
        assert process.returncode == 0, (folder / f"log{rank}").read_text()
        rows.append([json.loads(line) for line in out.splitlines()])
    return rows


def worst(rows: list[list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """By case, the largest of what the ranks found."""
    cases = [row["case"] for row in rows[0]]
    both = {case: [row for own in rows for row in own if row["case"] == case] for case in cases}
    return {case: {key: max(row[key] for row in found) for key in found[0]} for case, found in both.items()}
