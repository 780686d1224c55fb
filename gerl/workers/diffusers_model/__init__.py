"""The pipeline is the model: record and replay of any diffusers pipeline through its own `__call__`."""

from gerl.workers.diffusers_model.branch import branch
from gerl.workers.diffusers_model.record import record, record_probe
from gerl.workers.diffusers_model.replay import ReplayedStep, replay
from gerl.workers.diffusers_model.tape import Tape

__all__ = ["ReplayedStep", "Tape", "branch", "record", "record_probe", "replay"]
