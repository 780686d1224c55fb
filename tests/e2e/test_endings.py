"""However a run ends, its newest finished step is saved, said in a sentence, and it carries on bitwise."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from drills import ALL, more
from running import trained

from gerl.cluster import Cluster
from gerl.commandline.composition import compose_run
from gerl.run.report import write_report
from gerl.trainer.main_flowgrpo import main
from gerl.trainer.recovery import save_last_step
from gerl.trainer.run import Run
from gerl.utils.dataset import load_prompts
from gerl.workers.worker import PolicyWorker

STEPS = 8
SETTINGS = "checkpoint.every=0 actor.lr=0.01 rollout.micro_batch_size=2 cluster.num_workers=2".split()
FRAIL = "cluster.max_restarts=0"  # what a run without any more restarts does
SLOW = """
import time
import numpy as np

def compute_score(images, prompts, metadata):
    time.sleep(0.1)
    return [float(np.asarray(image).mean()) / 255 for image in images]
"""
Begin = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def whole(train: Callable[..., Any], workplace: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The run that ended by itself."""
    (workplace / "slow.py").write_text(SLOW)
    return train(tmp_path_factory.mktemp("whole") / "run", *SETTINGS, trainer__steps=STEPS)


@pytest.fixture
def begin(arguments: Callable[..., list[str]], start: Callable[..., Any], tmp_path: Path) -> Begin:
    """Start the run in `tmp_path / "run"` over Ray, or carry it on."""
    others = {"trainer__steps": STEPS, "cluster__launcher": "ray", "scorer": "slow.py"}
    command = arguments(tmp_path / "run", *SETTINGS, "checkpoint.resume=auto", **others)
    return lambda *overrides: start([*command, *overrides], GERL_TEST=str(tmp_path))


def step_of(folder: Path) -> int:
    try:
        return max(json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines())
    except (OSError, ValueError):
        return 0


def kill(process: "subprocess.Popen[str]", name: str, number: int) -> None:
    """kill -9 the child with this in its command line that was started `number`-th."""
    found = [c for c in psutil.Process(process.pid).children(recursive=True) if name in " ".join(c.cmdline())]
    sorted(found, key=lambda child: child.pid)[number].kill()


def ended(process: "subprocess.Popen[str]", place: Path) -> str:
    """The sentence that a run which failed has ended with; nothing of it may be left."""
    out, log = process.communicate(timeout=300)
    assert process.returncode == 1 and "Traceback" not in log and not out, out + log
    said = [line for line in log.splitlines() if line.startswith("error: ")]
    assert len(said) == 1 and log.strip().endswith(said[0]), log
    assert "checkpoint.resume=" in said[0] and not left(place), log
    return said[0]


def left(place: Path) -> list[str]:
    mark, found = f"GERL_TEST={place}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_bytes().decode())
        except OSError:
            continue  # it ended, or is not ours
    return found


# Ray's own processes, without which a new Ray is started
OF_RAY = ("raylet/raylet", *(["gcs_server"] if ALL else []))
# the process that is killed where none may be replaced, and how long after a step
KILLS = (("gcs_server", 0, 0.0), *([("raylet/raylet", 0, 0.0), ("ray::PolicyWorker", 1, 0.3)] if ALL else []))


@more
def test_a_run_survives_the_death_of_each_of_its_processes(
    begin: Begin, train: Callable[..., Any], whole: Any, run_of: Any, tmp_path: Path
) -> None:
    run, place = run_of(tmp_path / "run"), tmp_path / "run"
    process = begin()
    for step, name in enumerate(("ray::RewardWorker", *OF_RAY), start=1):
        wait_for_step(process, place, step)
        kill(process, name, 0)
    out, log = process.communicate(timeout=300)
    assert process.returncode == 0 and "Traceback" not in log and not out and not left(tmp_path), out + log
    assert log.count("without which Ray cannot run") == len(OF_RAY) and "returning to step" not in log, log
    run.assert_same(whole, STEPS)
    assert sum(run.column("scorer/bright/restarts")) == 1 and sum(run.column("cluster/restarts")) == 2 * len(OF_RAY)


@more
def test_a_run_in_which_nothing_may_die_any_more_ends_with_its_newest_step(
    begin: Begin, train: Callable[..., Any], whole: Any, run_of: Any, tmp_path: Path
) -> None:
    run, place = run_of(tmp_path / "run"), tmp_path / "run"
    for name, number, delay in KILLS:
        before, process = step_of(place), begin(FRAIL)
        wait_for_step(process, place, before + 1)
        time.sleep(delay)
        finished = step_of(place)
        kill(process, name, number)
        sentence = ended(process, place=tmp_path)
        newest = max((int(path.name[5:]) for path in (place / "checkpoints").glob("step_*")), default=0)
        assert newest >= finished and f"step_{newest}" in sentence, (name, finished, sentence)
    train(place, *SETTINGS, "checkpoint.resume=auto", trainer__steps=STEPS, scorer="slow.py")  # in this process
    state, expected = run.state(STEPS), whole.state(STEPS)
    assert sorted(state) == sorted(expected) and all(torch.equal(state[name], expected[name]) for name in state)
    assert run.untimed() == whole.untimed()


def wait_for_step(process: "subprocess.Popen[str]", place: Path, step: int) -> None:
    while step_of(place) < step:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


# Brightness; `raises` comes in the second optimizer step of trainer step 3 of the second of two workers, or, where it
# is SystemExit, from the scorer itself.
RAISING = """
import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

calls = []

def compute_score(images, prompts, metadata, raises):
    calls.append(raises)
    if raises == "SystemExit" and len(calls) == 11:  # after two trials and two steps
        raise SystemExit(0)
    if raises != "SystemExit" and len(calls) == 1:
        taken = []

        def hook(optimizer, args, kwargs):
            taken.append(1)
            if len(taken) == 12:
                handle.remove()
                raise {"OutOfMemoryError": torch.OutOfMemoryError, "ValueError": ValueError}[raises]("no room")

        handle = register_optimizer_step_pre_hook(hook)
    return [float(np.asarray(image).mean()) / 255 for image in images]
"""
HERE = (
    "checkpoint.every=0 actor.lr=0.01 rollout.micro_batch_size=2 actor.updates_per_step=2 cluster.num_workers=2".split()
)


@pytest.fixture(scope="module")
def undisturbed(train: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    return train(tmp_path_factory.mktemp("undisturbed") / "run", *HERE, trainer__steps=4)


RAISED = ["OutOfMemoryError", *(pytest.param(name, marks=more) for name in ("ValueError", "SystemExit"))]


@pytest.mark.parametrize("raises", RAISED)
def test_an_exception_in_the_middle_of_an_update_loses_no_finished_step(
    arguments: Callable[..., list[str]],
    workplace: Path,
    undisturbed: Any,
    run_of: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    raises: str,
) -> None:
    (workplace / f"{raises}.py").write_text(RAISING)
    run = run_of(tmp_path / "run")
    kwargs = f"reward.scorers.bright.kwargs={{raises: {raises}}}"
    stop = ["reward.retries=0", "reward.on_error=stop"]
    command = arguments(run.folder, *HERE, *stop, kwargs, trainer__steps=4, scorer=f"{raises}.py")
    if raises == "SystemExit":
        assert main(command) == 1
        said = capsys.readouterr().err.splitlines()[-1]
        assert f"{raises}.py, line 11:" in said and "sys.exit(0)" in said
    else:
        with pytest.raises((torch.OutOfMemoryError, ValueError), match="no room") as caught:
            main(command)
        said = " ".join(caught.value.__notes__)
    assert str(run.checkpoint(2)) in said and f"checkpoint.resume={run.folder}" in said
    assert main([*command, "checkpoint.resume=auto"]) == 0
    state, expected = run.state(4), undisturbed.state(4)
    assert sorted(state) == sorted(expected) and all(torch.equal(state[name], expected[name]) for name in state)
    assert run.untimed() == undisturbed.untimed()


def test_a_signal_while_a_failed_run_is_saved_hides_nothing(
    arguments: Callable[..., list[str]],
    workplace: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (workplace / "leaves.py").write_text(RAISING)

    def interrupted(run: Run) -> str:
        os.kill(os.getpid(), signal.SIGTERM)
        return save_last_step(run)

    monkeypatch.setattr("gerl.trainer.recovery.save_last_step", interrupted)
    own = ["reward.scorers.bright.kwargs={raises: SystemExit}", "reward.retries=0", "reward.on_error=stop"]
    run = tmp_path / "run"
    assert main(arguments(run, *HERE, *own, trainer__steps=4, scorer="leaves.py")) == 128 + signal.SIGTERM
    said = capsys.readouterr().err.splitlines()[-1]
    assert re.fullmatch(rf"error: .*sys\.exit\(0\).*; .*step_2: .*checkpoint\.resume={run}; .* by SIGTERM", said), said


def test_a_signal_while_the_report_is_written_leaves_a_finished_run(
    arguments: Callable[..., list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def interrupted(folder: Path) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        write_report(folder)

    monkeypatch.setattr("gerl.trainer.extensions.report.write_report", interrupted)
    run = tmp_path / "run"
    with caplog.at_level("INFO", logger="gerl"):
        assert main(arguments(run, trainer__steps=2, logger__report="true")) == 128 + signal.SIGTERM
    said = caplog.messages[-1]
    assert re.fullmatch(rf"stopped by SIGTERM; the run is finished, .*step_2: .*gerl\.run\.report run={run} .*", said)
    assert (run / "report.html").exists() and "checkpoint.resume" not in said
    monkeypatch.undo()
    assert main([*arguments(run, trainer__steps=2), "checkpoint.resume=auto"]) == 0


def test_every_worker_has_the_same_checkpoint(arguments: Callable[..., list[str]], tmp_path: Path) -> None:
    """Also in the middle of an update, where it is that of the step before."""
    config = compose_run(arguments(tmp_path / "run", *HERE, trainer__steps=1)).config
    prompts = load_prompts(config.data.train)
    with Cluster(config.cluster) as cluster:
        run = trained(config, tmp_path / "run", cluster, prompts)
        after = run.fleet.workers.run(PolicyWorker.checkpoint, 1)
        run.fleet.workers.run(PolicyWorker.step, 1)  # of the next step, and only its first optimizer step
        assert after[0] == after[1] == run.fleet.workers.run(PolicyWorker.checkpoint, 1)[1]
        run.fleet.workers.run(PolicyWorker.finish_step, 2)
        assert run.fleet.workers.run(PolicyWorker.checkpoint, 2)[1] != after[1]
