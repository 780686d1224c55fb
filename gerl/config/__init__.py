"""Every key, default, range and explanation of gerl's configuration, once.

The tree is flat: one dataclass a block, composed by Hydra (`configs/`), checked here before any work is done.
"""

import dataclasses
import difflib
from dataclasses import dataclass, field
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from gerl.config.algorithm import BY_NAME, AlgorithmConfig, AnyAlgorithm, FlowGRPOConfig, algorithm_config
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
from gerl.config.sampling import SamplingConfig
from gerl.errors import ConfigError

__all__ = [
    "ActorConfig", "AlgorithmConfig", "AnyAlgorithm", "CheckpointConfig", "ClusterConfig", "Config", "DataConfig",
    "LoggerConfig", "ModelConfig", "RewardConfig", "RolloutConfig", "SamplingConfig", "ScorerConfig", "TrainerConfig",
    "ValidationConfig", "algorithm_config", "did_you_mean", "from_mapping", "keys", "readers",
]  # fmt: skip


@dataclass(frozen=True)
class Config:
    """The whole configuration."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    model: ModelConfig = field(default_factory=ModelConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: AnyAlgorithm = field(default_factory=FlowGRPOConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    reward: RewardConfig = field(default_factory=lambda: RewardConfig({"ocr": ScorerConfig()}))
    data: DataConfig = field(default_factory=DataConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)

    def __post_init__(self) -> None:
        if self.rollout.n < 2 and not self.algorithm.groups_of_one:
            raise ConfigError(
                f"rollout.n={self.rollout.n}: {self.algorithm.name} compares images of the same prompt, use at least 2"
            )
        self.algorithm.check_sampling(self.sampling)
        self._check_batches()

    def _check_batches(self) -> None:
        rollout, actor, algorithm = self.rollout, self.actor, self.algorithm
        micro = actor.micro_batch_size
        if micro is not None and micro > rollout.micro_batch_size:
            raise ConfigError(
                f"actor.micro_batch_size={micro}: it must be at most rollout.micro_batch_size="
                f"{rollout.micro_batch_size}, whose recorded batches are replayed"
            )
        if algorithm.whole_groups and rollout.micro_batch_size < rollout.n:
            raise ConfigError(
                f"rollout.micro_batch_size={rollout.micro_batch_size}: {algorithm.name} needs the {rollout.n} images "
                "of a group in one micro-batch; raise it, or lower rollout.n"
            )
        compared = algorithm.compared(rollout.n)
        if micro is not None and micro < compared:
            raise ConfigError(
                f"actor.micro_batch_size={micro}: {algorithm.name} compares {compared} images within it; raise it"
            )
        if algorithm.cfg == "off" and algorithm.scores_steps and actor.updates_per_step > 1:
            raise ConfigError(
                f"actor.updates_per_step={actor.updates_per_step}: with algorithm.cfg=off the log-probabilities of the "
                "rollout are not those of the unguided policy, so only the first update is on policy; use 1"
            )


def from_mapping(values: dict[str, Any]) -> Config:
    """The typed configuration from nested dictionaries; raises `ConfigError` naming the first key that is wrong."""
    algorithm = values.get("algorithm", {})
    if isinstance(algorithm, dict):  # without a name it is the default one
        values = {**values, "algorithm": {"name": FlowGRPOConfig.name, **algorithm}}
    try:
        return TypeAdapter(Config).validate_python(values)
    except ValidationError as error:
        raise ConfigError(_sentence(error.errors()[0])) from None


def _sentence(first: ErrorDetails) -> str:
    location = [str(part) for part in first["loc"]]
    chosen = location.pop(1) if location[0] == "algorithm" and len(location) > 1 else None  # of the union
    name = ".".join(location)
    if first["type"] == "union_tag_invalid":
        *names, last = map(repr, BY_NAME)
        return f"algorithm.name={first['ctx']['tag']!r}: it must be {', '.join(names)} or {last}"
    if first["type"] != "unexpected_keyword_argument":
        return f"{name}={first['input']!r}: it must be {first['msg'].removeprefix('Input should be ')}"
    if chosen and (others := readers(location[-1])):
        return f"{name}={first['input']}: {chosen} does not read it, only {', '.join(others)}"
    return (
        f"{name}: there is no such key{did_you_mean(name, BY_NAME[chosen] if chosen else None)}; --help all lists all"
    )


def did_you_mean(name: str, algorithm: type[AlgorithmConfig] | None = None) -> str:
    """`, did you mean 'x'` for the key nearest to `name`; else what its block has, if there is such a block.

    `algorithm`: the one that is to read it; None: any.
    """
    names = [known for known, _ in keys(algorithm)]
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


def keys(algorithm: type[AlgorithmConfig] | None = None) -> list[tuple[str, dataclasses.Field[Any]]]:
    """Every key as `(block.name, field)`, in order; the keys of a scorer appear as `reward.scorers.NAME.*`.

    `algorithm`: only the keys that this one reads; None: those of all, each once.
    """
    rows: dict[str, dataclasses.Field[Any]] = {}
    for block in dataclasses.fields(Config):
        classes = [block.type] if block.name != "algorithm" else [algorithm] if algorithm else BY_NAME.values()
        for f in (f for cls in classes for f in dataclasses.fields(cls)):  # type: ignore[arg-type]
            rows.setdefault(f"{block.name}.{f.name}", f)
            if f.name == "scorers":
                rows |= {f"reward.scorers.NAME.{s.name}": s for s in dataclasses.fields(ScorerConfig)}
    return list(rows.items())


def readers(key: str) -> list[str]:
    """The names of the algorithms that read `algorithm.KEY`."""
    return [name for name, cls in BY_NAME.items() if key in (f.name for f in dataclasses.fields(cls))]
