"""The record of a run: what is saved is what is resumed."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from gerl.errors import CheckpointError
from gerl.run.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from gerl.run.state import RunState

STATE = RunState(
    step=3,
    policy_version=5,
    nonfinite=1,
    val_reward=0.25,
    unlogged={"reward/mean": 0.5, "reward/std": math.nan},
    worker={"policy_version": 5, "averages": {"ema": 5}},
    algorithm={"past": {"7": [0.1]}},
    identity={"trainer.seed": "0"},
)


def test_a_checkpoint_gives_back_the_record(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, STATE.step, {}, STATE.to_json())
    assert repr(RunState.of(load_checkpoint(tmp_path / "step_3"))) == repr(STATE)  # a NaN is not equal to itself


def test_a_checkpoint_from_before_the_record_had_the_policy_version() -> None:
    values = STATE.to_json()
    del values["policy_version"]
    assert RunState.of(Checkpoint(Path(), 3, values, ())).policy_version == 5


@pytest.mark.parametrize(("named", "value"), [("worker", None), ("worker", {}), ("step", "three"), ("unlogged", 1)])
def test_a_damaged_record_is_an_error_that_names_the_entry(named: str, value: Any) -> None:
    values = json.loads(json.dumps(STATE.to_json())) | {named: value}
    with pytest.raises(CheckpointError, match=rf"no usable {named}; .*checkpoint\.resume=never"):
        RunState.of(Checkpoint(Path("run/checkpoints/step_3"), 3, values, ()))
