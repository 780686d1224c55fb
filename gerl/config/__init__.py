"""Every key, default, range and explanation of gerl's configuration, once.

The tree is flat: one dataclass a block, composed by Hydra (`configs/`), checked here before any work is done.
"""

from gerl.config.algorithm import AnyAlgorithm, algorithm_config
from gerl.config.algorithm_keys import AlgorithmConfig
from gerl.config.blocks import (
    ActorConfig,
    CheckpointConfig,
    ClusterConfig,
    LoggerConfig,
    RewardConfig,
    RolloutConfig,
    ScorerConfig,
    TrainerConfig,
    ValidationConfig,
)
from gerl.config.configuration import MOST_IMAGES, Config
from gerl.config.data import DataConfig, Source, sources
from gerl.config.elsewhere import absent
from gerl.config.guard import GuardConfig
from gerl.config.model import ModelConfig
from gerl.config.names import LISTED, answered, did_you_mean, is_foreign, keys, nearest_key, other_name, readers
from gerl.config.reading import expected, from_mapping
from gerl.config.sampling import SamplingConfig
from gerl.config.schema import shown
from gerl.config.translation import Answer

__all__ = [
    "LISTED",
    "MOST_IMAGES",
    "ActorConfig",
    "AlgorithmConfig",
    "Answer",
    "AnyAlgorithm",
    "CheckpointConfig",
    "ClusterConfig",
    "Config",
    "DataConfig",
    "GuardConfig",
    "LoggerConfig",
    "ModelConfig",
    "RewardConfig",
    "RolloutConfig",
    "SamplingConfig",
    "ScorerConfig",
    "Source",
    "TrainerConfig",
    "ValidationConfig",
    "absent",
    "algorithm_config",
    "answered",
    "did_you_mean",
    "expected",
    "from_mapping",
    "is_foreign",
    "keys",
    "nearest_key",
    "other_name",
    "readers",
    "shown",
    "sources",
]  # fmt: skip
