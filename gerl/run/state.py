"""The state of a run between trainer steps: one record, which a checkpoint keeps as its `state.json`."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from gerl.errors import CheckpointError
from gerl.run.checkpoint import Checkpoint

PARTS = "state"  # the folder of a checkpoint with the parts of trained weights
FROZEN = ".frozen"  # one with parts of weights that are not trained, until the denoisers are written
STRICT = ConfigDict(strict=True)  # a number that was written as text is damage


@dataclass
class ScheduleState:
    """Where the learning-rate schedule stands; the rest of it follows from the configuration."""

    __pydantic_config__ = STRICT

    last_epoch: int  # optimizer steps taken, with those that were skipped


@dataclass
class WorkerState:
    """The numbers of a worker's update, besides its tensors."""

    __pydantic_config__ = STRICT

    policy_version: int  # optimizer steps taken
    averages: dict[str, int]  # name of an average of the weights -> its updates
    old_is_current: bool  # the old policy holds the trained weights
    lr_schedule: ScheduleState


@dataclass
class RunState:
    """Everything a resumed run must know besides the tensors of the workers; JSON values only."""

    __pydantic_config__ = STRICT

    step: int = 0  # finished trainer steps
    finished: bool = False  # there is nothing left to do
    policy_version: int = 0  # optimizer steps taken
    nonfinite: int = 0  # updates that were skipped because their gradient was not finite
    val_reward: float | None = None  # of the validation after this very step, if there was one
    unlogged: dict[str, float] = field(default_factory=dict)  # of a step that is trained, but not validated and logged
    worker: WorkerState | None = None  # of one worker, which stands for all; None: nothing is saved yet
    kl_coef: float | None = None  # the weight of the KL that the guard has raised; None: algorithm.kl_coef
    rollbacks: int = 0  # times that the guard has taken the run back
    algorithm: dict[str, Any] = field(default_factory=dict)  # see `Algorithm.state`
    identity: dict[str, str] = field(default_factory=dict)  # digests of the prompts and of the base weights
    extensions: dict[str, Any] = field(default_factory=dict)  # by name, see `Extension.state`
    settings: dict[str, Any] = field(default_factory=dict)  # see `settings_of`; empty in a checkpoint of format 1

    def to_json(self) -> dict[str, Any]:
        """The record as `save_checkpoint` takes it."""
        return asdict(self)

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "RunState":
        """The record of a checkpoint; raises `CheckpointError` if something in it is missing or of another type."""
        values = checkpoint.state
        try:
            worker = {"policy_version": values["worker"]["policy_version"]}  # where older checkpoints have it
            state = TypeAdapter(cls).validate_json(json.dumps(worker | values))
        except (KeyError, TypeError, ValidationError) as error:
            wrong = ".".join(map(str, error.errors()[0]["loc"])) if isinstance(error, ValidationError) else "worker"
            raise _unusable(checkpoint, wrong) from None
        if state.worker is None:
            raise _unusable(checkpoint, "worker")
        if state.step != checkpoint.step or state.step < 0:
            raise _unusable(checkpoint, "step")
        return state


def _unusable(checkpoint: Checkpoint, entry: str) -> CheckpointError:
    return CheckpointError(
        f"{checkpoint.path} cannot be resumed: its state.json has no usable {entry}; resume another one, or start "
        "a new run with checkpoint.resume=never"
    )
