"""Optional parts of a run, one per file, called by the training loop at fixed points.

An extension sees the public attributes of `Run` and nothing else. Without its file and its line in `EXTENSIONS` the
trainer still trains.
"""

from collections.abc import Mapping
from importlib import import_module

from gerl.config import Config
from gerl.trainer.run import Extension

# in the order in which they are called
EXTENSIONS = (
    "control:ControlFiles",
    "debug_lines:DebugLines",
    "deadline:Deadline",
    "trackers:Trackers",
    "gardo:KLGate",
    "kl_in_reward:KLInReward",
    "critic:Critic",
    "dynamic_sampling:DynamicSampling",
    "early:EarlyGradients",
    "episodes:Episodes",
    "episode_images:EpisodeImages",
    "training_images:TrainingImages",
    "moving_reference:MovingReference",
    "chosen_metrics:ChosenMetrics",
    "stop_at:StopAt",
    "guard:HackingGuard",
    "health:HealthChecks",
    "dump:StepDump",
    "timeline:TimelineFile",
    "progress:ProgressBar",
    "report:Report",
)


def build_extensions(config: Config, names: tuple[str, ...] = EXTENSIONS) -> Mapping[str, Extension]:
    """Build the extensions that `config` needs, by the name of their module, in order."""
    extensions: dict[str, Extension] = {}
    for name in names:
        module, _, kind = name.partition(":")
        cls: type[Extension] = getattr(import_module(f"{__name__}.{module}"), kind)
        if cls.wanted(config):
            extensions[module] = cls(config)
    return extensions
