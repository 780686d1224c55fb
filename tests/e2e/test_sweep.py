"""Sweeps: every combination in a process of its own, a table of them, failures and signals, and Hydra's plugins."""

import csv
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from drills import more

from gerl.trainer.main_flowgrpo import main

APART = ("sweepers", "scipy")  # folders beside the environment: tests/apart.py says why
MAYBE = """
from pathlib import Path

import numpy as np

def compute_score(images, prompts, metadata, needs=""):
    if needs and not Path(needs).exists():
        raise ValueError("not yet")
    return [float(np.asarray(image).mean()) / 255 for image in images]
"""


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "sweep.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def swept(arguments: Callable[..., list[str]], workplace: Path) -> Callable[..., list[str]]:
    """The arguments of a sweep of small runs into a folder."""

    def build(folder: Path, *overrides: str, **keys: Any) -> list[str]:
        given = arguments(Path("unused"), validation__data=workplace / "val.txt", validation__every=1, **keys)
        given = [argument for argument in given if not argument.startswith("hydra.run.dir")]
        return ["-m", *given, f"hydra.sweep.dir={folder}", *overrides]

    return build


@more
def test_a_run_that_fails_ends_no_other_and_the_sweep_is_carried_on(
    swept: Callable[..., list[str]],
    run_of: Any,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="gerl")
    (tmp_path / "maybe.py").write_text(MAYBE)
    folder, there = tmp_path / "sweep", tmp_path / "there"
    given = swept(folder, f"reward.scorers.bright.kwargs.needs={there},''", "trainer.seed=1", scorer="")
    given += [f"reward.scorers.bright.path={tmp_path / 'maybe.py'}", "reward.on_error=stop", "checkpoint.resume=auto"]
    assert main(given) == 1
    first, second = rows(folder)
    assert (second["end"], second["reward.scorers.bright.kwargs.needs"]) == ("finished", "''")
    assert "ValueError: not yet" in first["end"] and first["final"] == ""
    run = run_of(folder / "1")
    assert float(second["final"]) == pytest.approx(run.column("val/reward/mean")[-1])
    assert float(second["best"]) == pytest.approx(max(run.column("val/reward/mean")))
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: 1 of 2 runs")]
    assert len(said) == 1 and f"hydra.sweep.dir={folder}" in said[0] and "checkpoint.resume=auto" in said[0]
    assert "run 1 of the sweep: reward.scorers.bright.kwargs.needs=''" in caplog.text.replace("++", "")
    there.touch()
    caplog.clear()
    assert main(given) == 0
    assert [row["end"] for row in rows(folder)] == ["finished", "finished"]
    assert json.loads((folder / "sweep.json").read_text())["runs"][0]["folder"] == str(folder / "0")
    assert len(json.loads((folder / "1" / "run.json").read_text())["sessions"]) == 1  # it was finished already


def test_a_signal_ends_the_sweep_with_a_checkpoint_of_the_run(
    swept: Callable[..., list[str]], start: Callable[..., Any], run_of: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "sweep"
    process = start(swept(folder, "trainer.steps=500", "trainer.seed=1,2"))
    run, end = run_of(folder / "0_seed_1"), time.monotonic() + 180
    while not (run.folder / "metrics.jsonl").exists() or not run.column("reward/mean"):
        assert process.poll() is None and time.monotonic() < end, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)  # to this process alone, as a scheduler does
    _, log = process.communicate(timeout=120)
    assert process.returncode == 143 and "Traceback" not in log, log
    last = log.strip().splitlines()[-1]
    assert last.startswith("stopped by SIGTERM") and f"hydra.sweep.dir={folder}" in last
    assert list((run.folder / "checkpoints").glob("step_*"))
    (row,) = rows(folder)  # the second was not begun
    assert row["end"] == "unfinished" and row["trainer.seed"] == "1" and float(row["final"]) > 0


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> str:
    """Hydra's plugins, which `make` puts apart, on the path of the processes that a test starts."""
    folders = [Path(sys.prefix) / name for name in APART]
    if not folders[0].is_dir():
        pytest.skip("Hydra's plugins are not installed; make installs them, and so does 'gerl[optuna,submitit]'")
    return os.pathsep.join([str(Path(__file__).resolve().parents[2]), *map(str, folders)])


@more
def test_optuna_chooses_and_submitit_starts(
    swept: Callable[..., list[str]], start: Callable[..., Any], plugins: str, tmp_path: Path
) -> None:
    folder = tmp_path / "sweep"
    given = swept(folder, "hydra/sweeper=optuna", "hydra/launcher=submitit_local", "actor.lr=interval(1e-5,1e-2)")
    given += ["hydra.sweeper.n_trials=2", "hydra.sweeper.n_jobs=2", "hydra.sweeper.sampler.seed=1"]
    process = start(given, PYTHONPATH=plugins)
    _, log = process.communicate(timeout=300)
    assert process.returncode == 0, log
    found = rows(folder)
    assert [row["end"] for row in found] == ["finished", "finished"] and found[0]["actor.lr"] != found[1]["actor.lr"]
    assert all((Path(row["folder"]) / "checkpoints" / "step_2").is_dir() for row in found)
    best = yaml.safe_load((folder / "optimization_results.yaml").read_text())
    assert best["best_value"] == pytest.approx(max(float(row["final"]) for row in found))
