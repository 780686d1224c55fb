"""Workers may die or hang at any moment: others take their place, and the run ends as if nothing had been."""

import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drills import ALL, more
from running import trained

from gerl.cluster import Cluster
from gerl.commandline.composition import compose_run
from gerl.model.shards import Shards
from gerl.run.checkpoint import PARTS
from gerl.run.session import ask, asked
from gerl.run.tracking import read_metrics
from gerl.trainer.recovery import bring_together
from gerl.utils.dataset import load_prompts
from gerl.workers.fleet import RayFleet

ROOT = Path(__file__).resolve().parents[2]
STEPS = 6
SETTINGS = """
checkpoint.every=4 validation.every=3 actor.lr=0.01 actor.updates_per_step=2 rollout.micro_batch_size=2
cluster.num_workers=2
""".split()
Disturbed = Callable[..., Any]
Train = Callable[..., Any]


@pytest.fixture(scope="module")
def undisturbed(train: Callable[..., Any], workplace: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    return train(folder, *SETTINGS, trainer__steps=STEPS, validation__data=workplace / "val.txt")


@pytest.fixture
def disturbed(train: Callable[..., Any], workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disturbed:
    """A run over Ray in which workers get signals: `METHOD.NUMBER.STEP` -> signal."""

    def run(wished: dict[str, int], *overrides: str) -> Any:
        wishes = tmp_path / "kills"
        wishes.mkdir()
        for name, number in wished.items():
            (wishes / name).write_text(str(int(number)))
        monkeypatch.setenv("GERL_KILLS", str(wishes))  # the workers inherit both
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "tests" / "in_workers"), str(ROOT)]))
        more = {"trainer__steps": STEPS, "validation__data": workplace / "val.txt", "cluster__launcher": "ray"}
        done = train(tmp_path / "run", *SETTINGS, *overrides, **more)
        assert not list(wishes.iterdir()), "a worker was never asked to"
        return done

    return run


# where a worker is killed, in the last step two at once, and where one stands still (while it draws: below); an
# optimizer step begins with the all-reduce. Two that die as soon as they draw may take the copy of the last step with
# them, before it is sent
PHASES = "accumulate.0.6 accumulate.1.6"
if ALL:
    PHASES += " join.0.0 setup.1.0 reduce_gradient.0.2 validate.0.3 finish_step.1.5"
STANDS_STILL = "checkpoint.0.4"


@more
def test_workers_may_die_or_hang_in_every_phase(
    disturbed: Disturbed, undisturbed: Any, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    wished = dict.fromkeys(PHASES.split(), signal.SIGKILL) | {STANDS_STILL: signal.SIGSTOP}
    run = disturbed(
        wished, "logger.report=true", "cluster.max_restarts=20", "cluster.hang_after=12", "cluster.patience=600"
    )
    run.assert_same(undisturbed, STEPS)
    assert sum(run.column("cluster/restarts")) >= len(wished) - 1  # the others are of a start
    assert min(run.column("cluster/lost_s")[1:]) > 0  # step 1 was not disturbed
    assert re.search(r"\d+ workers that died, .* lost", (run.folder / "report.html").read_text())
    assert "continuing from step 5 with 2 new process(es)" in caplog.text
    assert re.search(r"no answer from worker 0.* for 12 s; .*hang_after.*continuing from step 4", caplog.text)
    assert "Traceback" not in capsys.readouterr().err + caplog.text


def test_a_step_that_nobody_holds_any_more_is_the_only_one_repeated(
    disturbed: Disturbed, train: Train, workplace: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The only worker dies when it is asked for step 3, before its copy has arrived: the copy of step 2 is there."""
    alone = ["checkpoint.every=0", "cluster.num_workers=1"]
    run = disturbed({"checkpoint.0.3": signal.SIGKILL}, *alone)
    assert "no worker is left that has step 3: returning to step 2" in caplog.text
    whole = train(tmp_path / "whole", *SETTINGS, *alone, trainer__steps=STEPS, validation__data=workplace / "val.txt")
    run.assert_same(whole, STEPS)


@more
def test_trained_weights_are_saved_by_a_worker_that_lives(
    disturbed: Disturbed, train: Train, workplace: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    full = ["model.train=full", "actor.full_lr=0.003", "actor.eps=1e-4", "checkpoint.every=0"]
    keys = {"trainer__steps": STEPS, "validation__data": workplace / "val.txt"}
    whole = train(tmp_path / "whole", *SETTINGS, *full, **keys)
    run = disturbed({"sample.0.3": signal.SIGKILL}, *full)
    assert "continuing from step 2 with 1 new process(es)" in caplog.text and "returning to step" not in caplog.text
    found, expected = (Shards(one.checkpoint(STEPS) / PARTS) for one in (run, whole))
    assert found.shapes().keys() == expected.shapes().keys()
    for name in found.shapes():
        assert torch.allclose(found.whole(name), expected.whole(name), rtol=1e-3, atol=2e-5), name


def test_workers_that_died_are_still_counted_where_the_run_goes_back(
    arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    config = compose_run(arguments(folder, trainer__steps=3, checkpoint__every=2)).config
    with Cluster(config.cluster) as cluster:
        prompts = load_prompts(config.data.train)
        run = trained(config, folder, cluster, prompts, prompts[:1])
        shutil.rmtree(folder / "checkpoints" / "step_3")
        rows = read_metrics(folder / "metrics.jsonl")
        rows[-1] |= {"cluster/restarts": 2.0, "cluster/lost_s": 7.5}
        (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        ask(folder, "stop")
        run.fleet = RayFleet(config, cluster, run.fleet.workers, run.fleet.timeline)
        bring_together(run, (), None)
        assert asked(folder) == ["stop"]
        assert [row["step"] for row in read_metrics(folder / "metrics.jsonl")][-1] == run.state.step == 2
        assert run.fleet.recovery is not None
        assert run.fleet.recovery.metrics() == {"cluster/restarts": 2.0, "cluster/lost_s": 7.5}
        assert run.fleet.recovery.metrics() == {}
        shutil.rmtree(folder / "checkpoints")  # back to the start, after which step 0 is not validated again
        bring_together(run, (), None)
        assert [row["step"] for row in read_metrics(folder / "metrics.jsonl")] == [run.state.step] == [0]
        assert run.history.log_start == 0
