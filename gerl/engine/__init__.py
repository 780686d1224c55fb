"""The pipeline is the model: record and replay of any diffusers pipeline through its own `__call__`."""

from gerl.engine.adjoint import LatentsGradient, pull_back
from gerl.engine.branch import branch
from gerl.engine.decode import decoded
from gerl.engine.feature_cache import FeatureCache
from gerl.engine.player import ReplayedStep
from gerl.engine.record import record, record_probe, record_structure
from gerl.engine.replay import replay
from gerl.engine.tape import Reads, Tape
from gerl.engine.trajectory import Trajectory, lean

__all__ = [
    "FeatureCache", "LatentsGradient", "Reads", "ReplayedStep", "Tape", "Trajectory", "branch", "decoded",
    "lean", "pull_back", "record", "record_probe", "record_structure", "replay",
]  # fmt: skip
