"""The record of a run: what is saved is what is resumed."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from gerl.errors import CheckpointError
from gerl.run.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from gerl.run.state import RunState, ScheduleState, WorkerState

STATE = RunState(
    step=3,
    policy_version=5,
    nonfinite=1,
    val_reward=0.25,
    unlogged={"reward/mean": 0.5, "reward/std": math.nan},
    worker=WorkerState(5, {"ema": 5}, True, ScheduleState(6)),
    algorithm={"past": {"7": [0.1]}},
    identity={"data.train": "0a"},
    settings={"trainer": {"seed": 0}},
)


def test_a_checkpoint_gives_back_the_record(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, STATE.step, {}, STATE.to_json())
    assert repr(RunState.of(load_checkpoint(tmp_path / "step_3"))) == repr(STATE)  # a NaN is not equal to itself


def test_a_checkpoint_from_before_the_record_had_the_policy_version() -> None:
    values = STATE.to_json()
    del values["policy_version"]
    assert RunState.of(Checkpoint(Path(), 3, values, ())).policy_version == 5


def worker(**changed: Any) -> dict[str, Any]:
    return {**STATE.to_json()["worker"], **changed}


@pytest.mark.parametrize(
    ("named", "value"),
    [
        ("worker", None),
        ("worker", {}),
        ("worker.policy_version", worker(policy_version="5")),
        ("worker.averages", worker(averages=[1])),
        ("worker.averages.ema", worker(averages={"ema": "many"})),
        ("worker.old_is_current", worker(old_is_current=2)),
        ("worker.lr_schedule", worker(lr_schedule=None)),
        ("worker.lr_schedule.last_epoch", worker(lr_schedule={"last_epoch": 1.5})),
        ("step", "three"),
        ("step", "3"),
        ("step", 4),  # not the step of the manifest
        ("unlogged", 1),
        ("algorithm", []),
        ("identity.data.train", {"data.train": 7}),
        ("settings", "none"),
    ],
)
def test_a_damaged_record_is_an_error_that_names_the_entry(named: str, value: Any) -> None:
    values = json.loads(json.dumps(STATE.to_json())) | {named.split(".")[0]: value}
    with pytest.raises(CheckpointError, match=rf"no usable {named}; .*checkpoint\.resume=never"):
        RunState.of(Checkpoint(Path("run/checkpoints/step_3"), 3, values, ()))


def test_the_worker_state_of_an_older_gerl_has_more_of_the_schedule() -> None:
    values = json.loads(json.dumps(STATE.to_json()))
    values["worker"]["lr_schedule"] = {"base_lrs": [0.1], "last_epoch": 6, "_step_count": 7, "_last_lr": [0.1]}
    del values["settings"]
    found = RunState.of(Checkpoint(Path(), 3, values, (), 1))
    assert found.worker == STATE.worker and found.settings == {}
