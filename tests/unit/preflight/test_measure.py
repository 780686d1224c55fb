"""Seconds and memory of a piece of work."""

from pathlib import Path

import pytest
import torch

from gerl.preflight import measure
from gerl.preflight.measure import Line, capacity, measured, through

LINUX = Path("/proc/self/status").exists()


def test_the_peak_is_that_of_the_work() -> None:
    result, large = measured("cpu", lambda: float(torch.ones(50_000_000).sum()))
    assert result == 5e7 and large.seconds > 0
    _, small = measured("cpu", lambda: None)
    if LINUX:
        assert large.peak is not None and small.peak is not None
        assert large.peak >= small.peak


def test_capacity_is_what_is_free_and_what_the_process_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "PROC", tmp_path)
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(measure, "LIMITS", (limit,))
    assert capacity("cpu") is None
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:   6 kB\n")
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "status").write_text("Name: x\nVmRSS:\t 2 kB\n")
    assert capacity("cpu") == 8 * 1024
    limit.write_text("max\n")
    assert capacity("cpu") == 8 * 1024
    limit.write_text("5000\n")
    assert capacity("cpu") == 5000


def test_without_proc_the_peak_is_that_of_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "PROC", tmp_path)
    assert measured("cpu", lambda: None)[1].peak == measure._peak()
    assert (measure._peak() or 0) > 10_000_000
    monkeypatch.setattr(measure, "resource", None)
    assert measured("cpu", lambda: None)[1].peak is None


def test_a_line_through_two_sizes() -> None:
    line = through({4: 130.0, 1: 100.0})
    assert line == Line(90.0, 10.0) and line.at(8) == 170.0
    assert through({}) is None and through({4: 130.0}) is None and through({1: 100.0, 4: 100.0}) is None
