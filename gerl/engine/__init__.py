"""The pipeline is the model: record and replay of any diffusers pipeline through its own `__call__`."""

from gerl.engine.feature_cache import FeatureCache
from gerl.engine.latents import decoded
from gerl.engine.record import Trajectory, branch, lean, record, record_probe, record_structure
from gerl.engine.replay import LatentsGradient, ReplayedStep, pull_back, replay
from gerl.engine.tape import Reads, Tape

__all__ = [
    "FeatureCache", "LatentsGradient", "Reads", "ReplayedStep", "Tape", "Trajectory", "branch", "decoded",
    "lean", "pull_back", "record", "record_probe", "record_structure", "replay",
]  # fmt: skip
