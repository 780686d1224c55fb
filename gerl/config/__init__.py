"""The configuration of gerl: one dataclass per block, composed by Hydra (`configs/`) and validated here."""

from importlib import import_module

from gerl.config.algorithms import AlgorithmConfig, AnyAlgorithm, algorithm_config
from gerl.config.blocks import (
    ActorConfig,
    CheckpointConfig,
    ClusterConfig,
    CriticConfig,
    DataConfig,
    GuardConfig,
    LoggerConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    SamplingConfig,
    ScorerConfig,
    Source,
    TrainerConfig,
    ValidationConfig,
    sources,
)
from gerl.config.configuration import MOST_IMAGES, Config
from gerl.config.other_programs import absent
from gerl.config.reading import expected, from_mapping
from gerl.config.schema import shown
from gerl.config.suggestions import (
    LISTED,
    Answer,
    answered,
    did_you_mean,
    is_foreign,
    keys,
    nearest_key,
    other_name,
    readers,
)

__all__ = [
    "LISTED", "MOST_IMAGES", "ActorConfig", "AlgorithmConfig", "Answer", "AnyAlgorithm", "CheckpointConfig",
    "ClusterConfig", "Config", "CriticConfig", "DataConfig", "GuardConfig", "LoggerConfig", "ModelConfig",
    "RewardConfig", "RolloutConfig", "SamplingConfig", "ScorerConfig", "Source", "TrainerConfig",
    "ValidationConfig", "absent", "algorithm_config", "answered", "did_you_mean", "expected", "from_mapping",
    "is_foreign", "keys", "nearest_key", "other_name", "readers", "shown", "sources",
]  # fmt: skip


def __getattr__(name: str) -> object:
    """`gerl.config.load`, which is `gerl.load_config` now."""
    if name == "load":
        return import_module("gerl.commandline.composition").load_config
    raise AttributeError(f"module 'gerl.config' has no attribute {name!r}")
