"""Every key, default, range and explanation of gerl's configuration, once.

The tree is flat: one dataclass a block, composed by Hydra (`configs/`), checked here before any work is done.
"""

import dataclasses
import difflib
from dataclasses import dataclass, field
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from gerl.config.algorithm import FORWARD_PROCESS, POLICY_GRADIENT, TREES, AlgorithmConfig, SamplingConfig
from gerl.config.blocks import (
    ActorConfig,
    CheckpointConfig,
    ClusterConfig,
    DataConfig,
    LoggerConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    ScorerConfig,
    TrainerConfig,
    ValidationConfig,
)
from gerl.errors import ConfigError

__all__ = [
    "FORWARD_PROCESS", "POLICY_GRADIENT", "TREES", "ActorConfig", "AlgorithmConfig", "CheckpointConfig",
    "ClusterConfig", "Config", "DataConfig", "LoggerConfig", "ModelConfig", "RewardConfig", "RolloutConfig",
    "SamplingConfig", "ScorerConfig", "TrainerConfig", "ValidationConfig", "did_you_mean", "from_mapping", "keys",
]  # fmt: skip


@dataclass(frozen=True)
class Config:
    """The whole configuration."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    model: ModelConfig = field(default_factory=ModelConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    reward: RewardConfig = field(default_factory=lambda: RewardConfig({"ocr": ScorerConfig()}))
    data: DataConfig = field(default_factory=DataConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)

    def __post_init__(self) -> None:
        algorithm, sampling, rollout = self.algorithm, self.sampling, self.rollout
        alone = algorithm.history > 0 or algorithm.adv_estimator == "reinforce_pp" or algorithm.name in TREES
        if rollout.n < 2 and not alone:
            raise ConfigError(
                f"rollout.n={rollout.n}: {algorithm.name} compares images of the same prompt, use at least 2"
            )
        if algorithm.is_policy_gradient and (sampling.noise_level == 0 or sampling.kernel == "ode"):
            name = "kernel=ode" if sampling.kernel == "ode" else "noise_level=0"
            raise ConfigError(
                f"sampling.{name}: {algorithm.name} is a policy gradient and needs stochastic steps: "
                "a deterministic one has no log-probability; use kernel=flow_sde with noise_level=0.7, or "
                "algorithm=diffusion_nft"
            )
        self._check_batches()
        self._check_trees()

    def _check_batches(self) -> None:
        rollout, actor, name = self.rollout, self.actor, self.algorithm.name
        micro = actor.micro_batch_size
        if micro is not None and micro > rollout.micro_batch_size:
            raise ConfigError(
                f"actor.micro_batch_size={micro}: it must be at most rollout.micro_batch_size="
                f"{rollout.micro_batch_size}, whose recorded batches are replayed"
            )
        whole = {"dgpo": rollout.n, "crd": rollout.n, "diffusion_dpo": rollout.n}.get(name, 0)
        if rollout.micro_batch_size < whole:
            raise ConfigError(
                f"rollout.micro_batch_size={rollout.micro_batch_size}: {name} needs the {whole} images of a "
                "group in one micro-batch; raise it, or lower rollout.n"
            )
        trained = 2 if name == "diffusion_dpo" else whole
        if micro is not None and micro < trained:
            raise ConfigError(f"actor.micro_batch_size={micro}: {name} compares {trained} images within it; raise it")
        if self.algorithm.cfg == "off" and self.algorithm.is_policy_gradient and actor.updates_per_step > 1:
            raise ConfigError(
                f"actor.updates_per_step={actor.updates_per_step}: with algorithm.cfg=off the log-probabilities of the "
                "rollout are not those of the unguided policy, so only the first update is on policy; use 1"
            )

    def _check_trees(self) -> None:
        algorithm, sampling = self.algorithm, self.sampling
        if algorithm.name not in TREES:
            return
        last = sampling.steps_range[1] - 1
        if algorithm.name == "branch_grpo" and algorithm.split_steps[-1] > last:
            raise ConfigError(
                f"algorithm.split_steps={list(algorithm.split_steps)}: the last stochastic step is {last}, split before"
            )
        if sampling.window_size is not None or sampling.compression < 1 or sampling.same_init_noise:
            raise ConfigError(
                f"sampling.window_size, compression and same_init_noise have no meaning for "
                f"{algorithm.name}, whose tree says which steps are stochastic; leave them at their defaults"
            )


def from_mapping(values: dict[str, Any]) -> Config:
    """The typed configuration from nested dictionaries; raises `ConfigError` naming the first key that is wrong."""
    try:
        return TypeAdapter(Config).validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        if first["type"] == "unexpected_keyword_argument":
            raise ConfigError(f"{name}: there is no such key{did_you_mean(name)}; --help lists all") from None
        message = first["msg"].removeprefix("Input should be ")
        raise ConfigError(f"{name}={first['input']!r}: it must be {message}") from None


def did_you_mean(name: str) -> str:
    """`, did you mean 'x'` for the key nearest to `name`; else what its block has, if there is such a block."""
    names = [known for known, _ in keys()]
    block, _, leaf = name.rpartition(".")
    leaves = [known.rpartition(".")[2] for known in names if block and known.rpartition(".")[0] == block]
    if leaves:  # only the last part is compared: the common beginning would make everything look near
        near = difflib.get_close_matches(leaf, leaves, n=1)
        return f", did you mean {f'{block}.{near[0]}'!r}" if near else f"; {block} has {', '.join(leaves)}"
    if inside := [known for known in names if not block and known.rpartition(".")[2] == name]:
        return f", did you mean {inside[0]!r}"
    candidates = names if block else sorted({known.split(".")[0] for known in names})
    near = difflib.get_close_matches(name, candidates, n=1)
    return f", did you mean {near[0]!r}" if near else ""


def keys() -> list[tuple[str, dataclasses.Field[Any]]]:
    """Every key as `(block.name, field)`, in order; the keys of a scorer appear as `reward.scorers.NAME.*`."""
    rows = []
    for block in dataclasses.fields(Config):
        for f in dataclasses.fields(block.type):  # type: ignore[arg-type]
            rows.append((f"{block.name}.{f.name}", f))
            if f.name == "scorers":
                rows += [(f"reward.scorers.NAME.{s.name}", s) for s in dataclasses.fields(ScorerConfig)]
    return rows
