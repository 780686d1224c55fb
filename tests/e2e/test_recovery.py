"""Workers may die or hang at any moment: others take their place, and the run ends as if nothing had been."""

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

KILLING = Path(__file__).resolve().parents[1] / "killing"
STEPS = 9
SETTINGS = """
checkpoint.every=4 validation.every=3 actor.lr=0.01 actor.updates_per_step=2 rollout.micro_batch_size=2
cluster.num_workers=2
""".split()
Disturbed = Callable[..., tuple[Any, str]]


@pytest.fixture(scope="module")
def undisturbed(train: Callable[..., Any], workplace: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    return train(folder, *SETTINGS, trainer__steps=STEPS, validation__data=workplace / "val.txt")


@pytest.fixture
def disturbed(
    arguments: Callable[..., list[str]], start: Callable[..., Any], run_of: Any, workplace: Path, tmp_path: Path
) -> Disturbed:
    """A run over Ray in which workers get signals: `METHOD.NUMBER.STEP` -> signal; returns the run and its log."""

    def run(kills: dict[str, int], *overrides: str) -> tuple[Any, str]:
        wishes = tmp_path / "kills"
        wishes.mkdir()
        for name, number in kills.items():
            (wishes / name).write_text(str(int(number)))
        more = {"trainer__steps": STEPS, "validation__data": workplace / "val.txt", "cluster__launcher": "ray"}
        command = arguments(tmp_path / "run", *SETTINGS, *overrides, **more)
        process: subprocess.Popen[str] = start(command, GERL_KILLS=str(wishes), PYTHONPATH=str(KILLING))
        _, log = process.communicate(timeout=600)
        assert process.returncode == 0, log
        assert not list(wishes.iterdir()), "a worker was never asked to"
        return run_of(tmp_path / "run"), log

    return run


def assert_same(run: Any, expected: Any) -> None:
    """LoRA, averages, moments and metrics are bitwise equal, but for the record of what was replaced."""
    state, other = run.state(STEPS), expected.state(STEPS)
    assert sorted(state) == sorted(other) and all(torch.equal(state[name], other[name]) for name in state)
    rows = [{key: value for key, value in row.items() if not key.startswith("cluster/")} for row in run.untimed()]
    assert rows == expected.untimed()


def test_workers_may_be_killed_in_every_phase(disturbed: Disturbed, undisturbed: Any) -> None:
    kills = ["setup.1.0", "generate.0.1", "accumulate.1.2", "reduce_gradient.0.3", "validate.0.3", "finished.0.4"]
    kills += ["step.0.5", "finish_step.1.6", "generate.0.8", "generate.1.8"]  # two at once
    run, log = disturbed(dict.fromkeys(kills, signal.SIGKILL), "cluster.max_restarts=20")
    assert_same(run, undisturbed)
    assert sum(run.column("cluster/restarts")) >= len(kills) - 1 and min(run.column("cluster/lost_s")) > 0  # of a start
    assert "Traceback" not in log and "going on from step 7 with 2 new process(es)" in log
