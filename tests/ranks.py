"""The ranks of a worker as processes: those of a program that imports what they need once, and what they say."""

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# what is freed goes back to the system, so that its memory can be measured; that takes time
MEASURED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
SECONDS = 1200  # that they get


def run_ranks(program: str, folder: Path, count: int, *arguments: str, **variables: str) -> list[list[dict[str, Any]]]:
    """The lines that each of `count` ranks of `tests/PROGRAM.py` writes; they meet in `folder`."""
    path = os.pathsep.join(map(str, [ROOT, ROOT / "tests", Path(sys.prefix) / "torchao"]))
    command = [sys.executable, "-W", "ignore", "-m", program, str(count), str(folder), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    return [[json.loads(line) for line in (folder / f"rank{rank}").read_text().splitlines()] for rank in range(count)]


def fork(work: Callable[[int, int, str, list[str]], None]) -> None:
    """The whole of such a program: `work(rank, count, store, arguments)` of each rank; ends the process."""
    count, folder, arguments = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    ranks = []
    for rank in range(count):
        if process := os.fork():
            ranks.append(process)
            continue
        code = 1
        try:
            with (folder / f"rank{rank}").open("w") as file:
                os.dup2(file.fileno(), sys.stdout.fileno())
            work(rank, count, str(folder / "store"), arguments)
            sys.stdout.flush()
            code = 0
        except BaseException:  # noqa: BLE001 - it must not come back into what follows the fork
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    failed = 0
    while ranks and not failed:
        process, status = os.wait()
        ranks.remove(process)
        failed = os.waitstatus_to_exitcode(status)
    for process in ranks:  # they would wait for it
        os.kill(process, 9)
    sys.exit(1 if failed else 0)


def worst(rows: list[list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """By case, the largest of what the ranks found."""
    cases = [row["case"] for row in rows[0]]
    both = {case: [row for own in rows for row in own if row["case"] == case] for case in cases}
    return {case: {key: max(row[key] for row in found) for key in found[0]} for case, found in both.items()}
