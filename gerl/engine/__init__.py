"""The pipeline is the model: record and replay of any diffusers pipeline through its own `__call__`."""

from gerl.engine.branch import branch
from gerl.engine.record import record, record_probe
from gerl.engine.replay import ReplayedStep, replay
from gerl.engine.tape import Tape

__all__ = ["ReplayedStep", "Tape", "branch", "record", "record_probe", "replay"]
