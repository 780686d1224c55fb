"""The state of a run between trainer steps: one record, which a checkpoint keeps as its `state.json`."""

from dataclasses import asdict, dataclass, field
from typing import Any

from pydantic import TypeAdapter, ValidationError

from gerl.errors import CheckpointError
from gerl.run.checkpoint import Checkpoint


@dataclass
class RunState:
    """Everything a resumed run must know besides the tensors of the workers; JSON values only."""

    step: int = 0  # finished trainer steps
    finished: bool = False  # there is nothing left to do
    policy_version: int = 0  # optimizer steps taken
    nonfinite: int = 0  # updates that were skipped because their gradient was not finite
    val_reward: float | None = None  # of the validation after this very step, if there was one
    unlogged: dict[str, float] = field(default_factory=dict)  # of a step that is trained, but not validated and logged
    worker: dict[str, Any] = field(default_factory=dict)  # see `Actor.state`
    algorithm: dict[str, Any] = field(default_factory=dict)  # see `Algorithm.state`
    identity: dict[str, str] = field(default_factory=dict)  # what a resumed run must have in common with this one

    def to_json(self) -> dict[str, Any]:
        """The record as `save_checkpoint` takes it."""
        return asdict(self)

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "RunState":
        """The record of a checkpoint; raises `CheckpointError` if something is missing in it."""
        values = checkpoint.state
        try:
            worker = {"policy_version": values["worker"]["policy_version"]}  # where older checkpoints have it
            return TypeAdapter(cls).validate_python(worker | values)
        except (KeyError, TypeError, ValidationError) as error:
            wrong = ".".join(map(str, error.errors()[0]["loc"])) if isinstance(error, ValidationError) else "worker"
            raise CheckpointError(
                f"{checkpoint.path} cannot be resumed: its state.json has no usable {wrong}; resume another one, "
                "or start anew with checkpoint.resume=never"
            ) from None
