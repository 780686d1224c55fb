"""benchmarks/real_size.py: what it sees of processes, and when it starts nothing."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import real_size

HELD, MAPPED = 40_000_000, 60_000_000  # bytes
HOLDS = f"""
import mmap, sys
file = open(sys.argv[1], "rb")
mapped, held = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), b"1" * {HELD}
read = [mapped[i] for i in range(0, len(mapped), 4096)]
print("there", flush=True)
sys.stdin.read()
"""


def test_memory_of_a_process_is_its_own_or_mapped_from_the_weights(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"1" * MAPPED)
    # two workers of a run, and a process that Ray starts, below this one
    titles = ["ray::PolicyWorker.sample", "ray::PolicyWorker.sample", "raylet"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    command = ["-I", "-S", "-c", HOLDS, str(weights)]
    processes = [subprocess.Popen([title, *command], executable=sys.executable, **pipes) for title in titles]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline()
    watch = real_size.Watch(real_size.os.getpid())
    watch.start()
    until = time.monotonic() + 60
    while time.monotonic() < until and sum(bool(p.weights) for p in [*watch.processes.values()]) < 2:
        time.sleep(0.02)
    seen = {process.pid: process for process in watch.end()}
    for process in processes:
        process.communicate(b"")
    first, second, service = (seen[process.pid] for process in processes)
    assert [first.role, second.role, service.role] == ["rollout worker", "rollout worker", "Ray"]
    assert seen[watch.root].role == "driver" and not service.weights
    for worker in (first, second):
        _, resident, part = worker.weights[-1]
        assert MAPPED <= resident < MAPPED + 10_000 and part < 0.6 * resident  # three share them
    assert MAPPED * 0.6 < real_size.mapped_together([first, second]) < MAPPED * 0.7, "the third part is the service's"
    for worker in (first, second):
        assert HELD < max(look.own for look in worker.looks) < HELD + 15_000_000


def test_peaks_are_those_of_the_phases_of_the_run(tmp_path: Path) -> None:
    spans = [("load", 3, 5), ("sample", 6, 8), ("update", 8, 9), ("save", 8.5, 9)]
    rows = [f'{{"what": "{what}", "start": {start}, "end": {end}}}' for what, start, end in spans]
    (tmp_path / "timeline.jsonl").write_text("\n".join(rows))
    looks = [
        real_size.Look(moment, own, 0, 0) for moment, own in ((1, 7), (4, 5), (7, 3), (7.5, 4), (8.7, 9), (20, 99))
    ]
    process = real_size.Process(1, looks)
    phases = real_size.phases_of(tmp_path)
    assert real_size.peaks(process, phases) == {"loading": 7, "rollout": 4, "update": 9, "saving": 9}


def test_nothing_starts_without_room_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [{"weights": {"total": 33_800_000_000}}]
    report = {"facts": {"model": "FLUX", "parts": weights}, "main": {"total": 38e9, "checkpoint": 4e9}}
    monkeypatch.setattr(real_size, "memory_total", lambda: 25_000_000_000)
    with pytest.raises(SystemExit, match=r"FLUX needs 38\.0 GB of main memory.*25\.0 GB.*--leave-out"):
        real_size.check_room(report, tmp_path, tmp_path / "none")
    report["main"]["total"] = 1e9
    weights[0]["weights"]["total"] = 10**18
    with pytest.raises(SystemExit, match=r"GB free: name another --folder"):
        real_size.check_room(report, tmp_path, tmp_path / "none")
    real_size.check_room(report, tmp_path, tmp_path)  # the model is there
