"""Lazy imports of the algorithms, so that a wrong key is reported without importing torch."""

from typing import TYPE_CHECKING, Any

from gerl.utils.lazy import lazy

if TYPE_CHECKING:
    import torch
    from diffusers import DiffusionPipeline

    from gerl import engine
    from gerl.engine import ReplayedStep, Tape, Trajectory, transitions
    from gerl.engine.replay import StepGradients
    from gerl.engine.transitions import FlowRule, Rule
    from gerl.model.policy import Policy
else:
    torch, engine, transitions = lazy("torch"), lazy("gerl.engine"), lazy("gerl.engine.transitions")
    # only annotations name these classes
    DiffusionPipeline = ReplayedStep = Tape = Trajectory = FlowRule = Rule = Policy = StepGradients = Any

__all__ = [
    "DiffusionPipeline", "FlowRule", "Policy", "ReplayedStep", "Rule", "StepGradients", "Tape", "Trajectory", "engine",
    "torch", "transitions",
]  # fmt: skip
