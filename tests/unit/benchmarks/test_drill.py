"""The table of benchmarks/drill.py, and that the README has that of the results."""

import json
from typing import Any

import drill


def results(**changed: Any) -> dict[str, Any]:
    kills = [("worker", "drawing", 3, 4.2), ("worker", "drawing", 9, 8.4), ("scorer", "-", 12, 0.3)]
    memory = {"driver_mib": 400.0, "open_files": 30}
    found = {
        "kills": [dict(zip(("process", "phase", "step", "lost_s"), kill, strict=True)) for kill in kills],
        "steps": 20,
        "step_s": 1.25,
        "command": "python benchmarks/drill.py",
        "bitwise_equal": True,
        "processes_left": [],
        "files_left": [],
        "after_a_tenth": memory,
        "at_the_end": memory | {"driver_mib": 410.0},
    }
    return found | changed


def test_kills_are_counted_by_process_and_phase() -> None:
    lines = drill.table(results()).splitlines()
    assert lines[2:4] == ["| scorer | - | 1 | 0 | 0 |", "| worker | drawing | 2 | 6 | 8 |"]
    assert "3 kills in 20 steps of 1.2 s; the weights at the end are bitwise those" in lines[-4]
    assert (
        "0 processes and 0 files were left" in lines[-4] and "driver mib 400 -> 410, open files 30 -> 30" in lines[-3]
    )


def test_what_went_wrong_is_said() -> None:
    text = drill.table(results(bitwise_equal=False, processes_left=["ray::PolicyWorker"], files_left=["/tmp/a"]))
    assert "are NOT those" in text and "1 processes and 1 files" in text


def test_the_page_has_the_table_of_the_results() -> None:
    assert drill.table(json.loads(drill.RESULTS.read_text())) in drill.README.read_text(encoding="utf-8")
