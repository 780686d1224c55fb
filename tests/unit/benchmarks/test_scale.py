"""The simulation of benchmarks/scale.py, its fit, and that the README has its table."""

from dataclasses import replace
from typing import Any

import pytest
import scale
import scale_report as report
from drills import more
from scale_model import FREE, Fit, Network, Work, fit, fit_collective, least_squares, predicted, step_seconds
from scale_standin import PHASES, importable
from sections import with_section

INSTANT = Network(float("inf"), float("inf"), hop=0.0, latency=0.0)
WORK = Work(workers=1, images=24, micro_batch=6, draw=0.25, update=0.5)
COSTS: Fit = {
    "draw": {"one": 3e-3, "micro_batches": 2e-3, "images": 1e-4},
    "credit": {"one": 2e-3, "images": 2e-5},
    "update": {"one": 5e-3, "calls": 3e-4, "awaited": 1e-6},
    "other": {"one": 4e-3, "images": 1e-5, "workers": 1e-4},
}


@pytest.mark.parametrize("workers", [1, 4])
def test_without_overhead_nothing_is_lost(workers: int) -> None:
    work = replace(WORK, workers=workers, images=24 * workers)
    assert step_seconds(work, FREE, INSTANT) == pytest.approx(work.ideal) == pytest.approx(18.0)


def test_more_overhead_takes_longer() -> None:
    work = replace(WORK, workers=8, images=192, scorers=2)
    for changes in ({"score": s} for s in (0.0, 0.05, 0.3, 0.6)), ({"keep": s} for s in (0.0, 0.1, 1.0)):
        times = [step_seconds(replace(work, **change), COSTS, Network()) for change in changes]
        assert times == sorted(times) and times[-1] > times[0] > work.ideal
    slower = {part: {name: 10 * value for name, value in values.items()} for part, values in COSTS.items()}
    assert step_seconds(work, slower) > step_seconds(work, COSTS) > step_seconds(work)
    sizes = [step_seconds(replace(work, gradient=size)) for size in (0.0, 1e8, 1e9)]
    assert sizes == sorted(sizes)


def test_the_tail_of_the_scorer_is_what_the_hand_finds() -> None:
    """Four micro-batches of 1.5 s are drawn, each scored in 3 s by one scorer: it ends at 1.5 + 4 * 3 s."""
    slow = replace(WORK, score=0.5)
    assert step_seconds(slow, FREE, INSTANT) == pytest.approx(1.5 + 12 + 12)
    # one step ahead, scoring fits into training and drawing: 18 s of work, and 12 s of scoring meanwhile
    assert step_seconds(replace(slow, staleness=1), FREE, INSTANT) == pytest.approx(18.0)


def test_the_driver_is_what_the_hand_finds() -> None:
    """A driver that takes 0.1 s a call: each phase of an update waits for two workers' calls, one after the other."""
    costs = {part: dict(values) for part, values in FREE.items()}
    costs["update"]["calls"] = 0.1
    work = replace(WORK, workers=2, images=48, updates=1)
    # a phase submits in 2 * 0.05 s, and takes both answers after that: the second worker begins and ends last
    phases = (0.05 + 12 + 0.05 + 0.1) + (0.05 * 2 + 0.05 * 2)
    assert step_seconds(work, costs, INSTANT) == pytest.approx(6 + phases, abs=0.1)


def test_split_roles_work_at_the_same_time() -> None:
    work = replace(WORK, workers=4, actors=8, images=96, staleness=1)
    assert step_seconds(work, FREE, INSTANT) == pytest.approx(work.ideal) == pytest.approx(6.0)
    assert step_seconds(replace(work, staleness=0), FREE, INSTANT) == pytest.approx(12.0)


def row(workers: int, batches: int, images: int) -> dict[str, Any]:
    found: dict[str, Any] = {"workers": workers, "micro_batches": batches, "images": images}
    found["messages"] = {"accumulate": 2 * workers, "step": 2 * workers}
    calls = 4 * workers
    draw = 3e-3 + 2e-3 * batches + 1e-4 * images
    update = 5e-3 + 3e-4 * calls + 1e-6 * calls * workers
    found["cpu"] = {"draw": draw, "score": 0.0, "credit": 2e-3 + 2e-5 * images, "update": update}
    other = 4e-3 + 1e-5 * images + 1e-4 * workers
    found["timing"] = {"rollout": 3.0, "reward_wait": 1.0, "update": 2.0}
    found["cpu_s"] = sum(found["cpu"].values()) + other
    found["cpu"]["draw"] += 4.0 * 0.005  # what Ray's threads take while nothing happens
    found["cpu"]["update"] += 2.0 * 0.005
    return found | {"idle_cpu": 0.005, "cpu_s": found["cpu_s"] + 6.0 * 0.005}


def test_the_fit_finds_known_costs() -> None:
    rows = [row(w, w * b, w * b * i) for w in (1, 2, 4, 8) for b, i in ((4, 4), (8, 2), (4, 8))]
    found = fit(rows)
    for part, values in COSTS.items():
        assert found[part] == pytest.approx(values, rel=1e-6)
    assert predicted(found, row(64, 512, 2048)) == pytest.approx(row(64, 512, 2048)["cpu_s"] - 6.0 * 0.005)
    assert least_squares([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]], [3.0, 2.0, 1.0])[1] == 0.0  # nothing is negative


def test_the_collective_is_that_of_a_ring() -> None:
    rows = [
        {"workers": w, "bytes": size, "seconds": 2 * (w - 1) * 1e-4 + 2 * (w - 1) / w * size * 1e-9}
        for w in (2, 4, 8)
        for size in (1e4, 1e6, 1e8)
    ]
    assert fit_collective(rows) == pytest.approx((1e-4, 1e-9))
    assert Network(inside=1e9, hop=1e-4).all_reduce(8, 1e8) == pytest.approx(14e-4 + 14 / 8 * 0.1)
    assert Network().all_reduce(1, 1e9) == 0.0


def test_micro_batches_are_equally_many_in_every_update() -> None:
    for images in (6, 24, 36, 48):
        size = report.micro_batch(images, 2)
        assert size <= report.MOST and images % (2 * size) == 0


def test_the_readme_has_the_table_of_the_results() -> None:
    text, content = report.PAGE.read_text(encoding="utf-8"), report.section(report.load(report.SIMULATED))
    assert text == with_section(text, report.BEGIN, report.END, content)


@more
def test_workers_that_compute_nothing_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "SHAPES", ((2, 4),))
    monkeypatch.setattr(scale, "REPETITIONS", 1)
    monkeypatch.setenv("PYTHONPATH", importable())
    (found,) = scale.measure("echo", 2)["steps"]
    assert (found["workers"], found["micro_batches"], found["images"]) == (2, 4, 16)
    assert found["messages"] == {"sample": 4, "score": 4, "accumulate": 4, "step": 4, "checkpoint": 1}
    assert all(found["cpu"][phase] > 0 for phase in PHASES) and found["sent"] > 0
    assert found["step_s"] >= 3 * 8 * scale.ECHO  # a worker draws 8 images, and has all of them in two updates


def test_a_snapshot_has_a_size_and_takes_time() -> None:
    found = scale.snapshot(4)
    assert found["bytes"] > 4 * found["parameters"] and found["keep_s"] > 0 and found["finished_s"] > 0
