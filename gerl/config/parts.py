"""The whole configuration as the checks in modules of their own see it, which `Config` itself imports."""

from typing import Protocol

from gerl.config.algorithm_keys import AlgorithmConfig
from gerl.config.blocks import (
    ActorConfig,
    ClusterConfig,
    RewardConfig,
    RolloutConfig,
    TrainerConfig,
    ValidationConfig,
)
from gerl.config.data import DataConfig
from gerl.config.guard import GuardConfig
from gerl.config.model import ModelConfig
from gerl.config.sampling import SamplingConfig


class Settings(Protocol):
    """The parts of a `Config` that are looked at."""

    @property
    def model(self) -> ModelConfig: ...
    @property
    def sampling(self) -> SamplingConfig: ...
    @property
    def rollout(self) -> RolloutConfig: ...
    @property
    def algorithm(self) -> AlgorithmConfig: ...
    @property
    def actor(self) -> ActorConfig: ...
    @property
    def reward(self) -> RewardConfig: ...
    @property
    def data(self) -> DataConfig: ...
    @property
    def validation(self) -> ValidationConfig: ...
    @property
    def guard(self) -> GuardConfig: ...
    @property
    def cluster(self) -> ClusterConfig: ...
    @property
    def trainer(self) -> TrainerConfig: ...
    @property
    def lockstep(self) -> bool: ...
