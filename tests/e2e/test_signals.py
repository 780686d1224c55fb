"""Signals at random moments of a run: one sentence, the exit code, a checkpoint, no process left behind.

A run is signalled and carried on until it is finished, and must then be, bit for bit, the one that nothing interrupted.
Each costs a start: one is sent over Ray and one without it, or 20 and one (`drills.ALL`).
"""

import json
import os
import pty
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from drills import ALL, more

STEPS = 24 if ALL else 12
OVER_RAY = {1: 18, 2: 2} if ALL else {2: 1}  # signals by number of workers: with two a start costs half as much again
OFTEN = "validation.every=2 checkpoint.every=3 actor.lr=0.01 rollout.micro_batch_size=2".split()
OF_RAY = re.compile(r"\(raylet|\(gcs_server|\(\w+ pid=|Stack trace|core_worker|ray::|\[[\d:, -]+ [EWI] \d+ \d+\]")


@dataclass
class Moments:
    """When signals come: half of them before the first step, at any time of as long as that takes."""

    random: random.Random
    sent: int = 0
    start: float = 0.0  # seconds to the first step


@dataclass
class Drill:
    """A run that is signalled, carried on, and signalled again until it is finished."""

    run: Any
    begin: Callable[[], "subprocess.Popen[str]"]
    mark: str
    moments: Moments

    def once(self) -> bool:
        """Start or carry on, signal at a random moment; returns whether the run was finished before."""
        moments, steps = self.moments, self.steps()
        choose, loaded = moments.random, moments.sent % 2 == 0
        began, process = time.monotonic(), self.begin()
        while process.poll() is None and not listens(process.pid):  # before that it is Python that starts
            time.sleep(0.005)
        if loaded:
            while process.poll() is None and self.steps() == steps:
                time.sleep(0.02)
            moments.start = time.monotonic() - began
            time.sleep(choose.uniform(0, 0.8))
        else:
            time.sleep(choose.uniform(0, moments.start))
        number, group = choose.choice([signal.SIGINT, signal.SIGTERM, signal.SIGHUP]), choose.random() < 0.5
        alive = process.poll() is None
        if alive:
            (os.killpg if group else os.kill)(process.pid, number)
        moments.sent += alive
        out, log = process.communicate(timeout=300)
        what = f"signal {moments.sent}: {number} to {'the group' if group else 'it'}, after step {steps}\n{out}{log}"
        left = processes_with(self.mark)
        assert not left, f"{what}\n{left}"
        assert "Traceback" not in log and "Exception ignored" not in log and not OF_RAY.search(log), what
        if process.returncode == 0:
            assert "finished in" in log or f"is finished at step {STEPS}" in log, what
            return True
        assert process.returncode == 128 + number, what
        said = [line for line in log.splitlines() if "stopped by" in line]
        assert len(said) == 1 and signal.Signals(number).name in said[0] and log.strip().endswith(said[0]), what
        if (finished := self.steps()) > 0:
            newest = max(int(path.name[5:]) for path in (self.run.folder / "checkpoints").glob("step_*"))
            assert newest >= finished, what  # a step may be trained and not yet logged
            if finished > steps:  # otherwise it may have been stopped before it looked for checkpoints
                finished_run = json.loads((self.run.checkpoint(newest) / "state.json").read_text())["finished"]
                remedy = "gerl.run.report run=" if finished_run else "checkpoint.resume="
                assert f"step_{newest}" in said[0] and remedy in said[0], what
        return False

    def steps(self) -> int:
        """Finished steps, by the metrics."""
        try:
            return max((int(step) for step in re.findall(r'"step": (\d+)', self.text())), default=0)
        except OSError:
            return 0

    def text(self) -> str:
        return (self.run.folder / "metrics.jsonl").read_text()


def listens(process: int) -> bool:
    """Whether SIGTERM has a handler there."""
    try:
        caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{process}/status").read_text())
    except OSError:
        return True  # it has ended
    return caught is None or bool(int(caught[1], 16) >> (signal.SIGTERM - 1) & 1)


def processes_with(mark: str) -> list[str]:
    """Command lines of the processes that have this in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue  # it ended, or is not ours
    return found


@pytest.fixture
def run_whole(train: Callable[..., Any], workplace: Path) -> Callable[..., Any]:
    """The run that nothing interrupts, in this process, or the end of one that was."""

    def run(folder: Path, workers: int, *overrides: str) -> Any:
        settings = {"trainer__steps": STEPS, "validation__data": workplace / "val.txt", "cluster__num_workers": workers}
        return train(folder, *OFTEN, *overrides, **settings)

    return run


@pytest.fixture
def drills(
    arguments: Callable[..., list[str]], start: Callable[..., Any], run_of: Any, workplace: Path, tmp_path: Path
) -> Callable[..., Iterator[Drill]]:
    """One run after the other, each with `workers` workers; a signal is for the `launchers` that are next."""

    def build(moments: Moments, workers: int, launchers: list[str]) -> Iterator[Drill]:
        for number in range(1000):
            run, mark = run_of(tmp_path / f"{number}" / "run"), f"GERL_TEST={tmp_path}/{number}"
            settings = {"trainer__steps": STEPS, "validation__data": workplace / "val.txt"}
            command = arguments(run.folder, *OFTEN, "checkpoint.resume=auto", cluster__num_workers=workers, **settings)

            def begin(command: list[str] = command, value: str = mark.split("=")[1]) -> "subprocess.Popen[str]":
                return start([*command, f"cluster.launcher={launchers[moments.sent]}"], GERL_TEST=value)

            yield Drill(run, begin, mark, moments)

    return build


@more
@pytest.mark.parametrize("workers", OVER_RAY)
def test_signals_at_random_moments(drills: Any, run_whole: Callable[..., Any], tmp_path: Path, workers: int) -> None:
    launchers = ["ray"] * OVER_RAY[workers] + ["local"] * (workers == 2)
    moments = Moments(random.Random(len(launchers)))
    whole = run_whole(tmp_path / "whole", workers)
    for one in drills(moments, workers, launchers):
        while not (finished := one.once()) and moments.sent < len(launchers):
            pass
        if not finished:
            run_whole(one.run.folder, workers, "checkpoint.resume=auto")
        one.run.assert_same(whole, STEPS)
        if moments.sent >= len(launchers):
            break


@more
def test_a_terminal_that_is_closed_ends_a_run_in_order(
    arguments: Callable[..., list[str]], run_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(tmp_path / "run")
    command = arguments(run.folder, "checkpoint.every=0", "logger.progress=true", trainer__steps=100_000)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    process, terminal = pty.fork()
    if process == 0:
        os.execv(sys.executable, [sys.executable, "-m", "gerl.trainer.main_flowgrpo", *command])
    while not (run.folder / "metrics.jsonl").exists() or len(run.metrics) < 2:
        assert os.read(terminal, 100_000), "it has ended"
    os.close(terminal)
    _, status = os.waitpid(process, 0)
    assert os.waitstatus_to_exitcode(status) == 128 + signal.SIGHUP
    newest = run.metrics[-1]["step"]
    assert run.checkpoint(newest).is_dir()
    said = (run.folder / "log.txt").read_text()
    assert "the run ends: interrupted by signal 1\n" in said and f"{run.checkpoint(newest)}: resume with" in said
