"""The configuration of gerl: one dataclass per block, composed by Hydra (`configs/`) and validated here."""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

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
    "is_foreign", "keys", "load", "nearest_key", "other_name", "readers", "shown", "sources",
]  # fmt: skip


def load(experiment: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """Compose the checked configuration of a run, without starting one.

    `experiment`: name or YAML file, such as the `config.yaml` of a run; None: the signs demo. `overrides`: keys as on
    the command line, `["algorithm=diffusion_nft", "rollout.n=8"]`.

    Raises:
        ConfigError: unknown keys, wrong values, or values that exclude each other.
    """
    chosen = [] if experiment is None else [f"experiment={experiment}"]
    composition = import_module("gerl.commandline.composition")  # which imports Hydra, and this package
    found: Config = composition.compose_run([*chosen, *overrides]).config
    return found
