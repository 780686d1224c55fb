"""Recording and replay of any diffusers pipeline through its own `__call__`, without model-specific code."""

from gerl.engine.branch import branch
from gerl.engine.feature_cache import FeatureCache
from gerl.engine.latents import decoded
from gerl.engine.record import record, record_batch_probe, record_structure
from gerl.engine.replay import LatentsGradient, ReplayedStep, backprop_step, replay
from gerl.engine.tape import RequiredTensors, Tape, Trajectory, compact

__all__ = [
    "FeatureCache", "LatentsGradient", "ReplayedStep", "RequiredTensors", "Tape", "Trajectory", "backprop_step",
    "branch", "compact", "decoded", "record", "record_batch_probe", "record_structure", "replay",
]  # fmt: skip
