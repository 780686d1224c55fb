"""Every key, default, range and explanation of gerl's configuration, once.

The tree is flat: one dataclass a block, composed by Hydra (`configs/`), checked here before any work is done.
"""

import dataclasses
import difflib
import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from gerl.config.algorithm import BY_NAME, AnyAlgorithm, algorithm_config
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
from gerl.config.data import DataConfig, Source, sources
from gerl.config.elsewhere import MEANING, absent, elsewhere
from gerl.config.given import check_given
from gerl.config.guard import GuardConfig
from gerl.config.model import ModelConfig
from gerl.config.noised_images import AWMConfig
from gerl.config.policy_gradients import FlowGRPOConfig
from gerl.config.remedies import check_remedies
from gerl.config.reward_gradients import RewardGradientConfig
from gerl.config.sampling import SamplingConfig
from gerl.config.savings import check_savings
from gerl.config.schema import fits, kind_words, shown
from gerl.config.trained import check_trained
from gerl.errors import ConfigError

__all__ = [
    "LISTED", "ActorConfig", "AlgorithmConfig", "AnyAlgorithm", "CheckpointConfig", "ClusterConfig", "Config",
    "DataConfig", "GuardConfig", "LoggerConfig", "ModelConfig", "RewardConfig", "RolloutConfig", "SamplingConfig",
    "ScorerConfig", "Source", "TrainerConfig", "ValidationConfig", "absent", "algorithm_config", "did_you_mean",
    "expected", "from_mapping", "keys", "nearest_key", "other_name", "readers", "shown", "sources",
]  # fmt: skip


LISTED = "gerl train --help all lists all keys"
MOST_IMAGES = 10**6  # of a trainer step, which is planned, drawn and kept as a whole


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
    guard: GuardConfig = field(default_factory=GuardConfig)
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
        check_given(self)
        self._check_batches()
        self._check_gradients()
        self._check_data()
        self._check_ranks()
        check_trained(self)
        self._check_staleness()
        self._check_environments()
        check_savings(self)
        check_remedies(self)

    @property
    def has_kl(self) -> bool:
        """Whether the distance to the base model counts, or may while the run goes on."""
        return self.algorithm.kl_coef > 0 or self.guard.raises_kl

    @property
    def lockstep(self) -> bool:
        """Whether ranks gather weights or tokens from each other, and so have to call the model equally often."""
        return self.lockstep_ranks > 1

    @property
    def lockstep_ranks(self) -> int:
        """How many ranks do so together: those of a worker, or only those that share the tokens of a call."""
        return self.cluster.context if self.model.shard == "none" else self.cluster.ranks_per_worker

    def _check_environments(self) -> None:
        named = [name for name, scorer in self.reward.scorers.items() if scorer.env]
        if named and self.cluster.launcher == "local":
            raise ConfigError(
                f"reward.scorers.{named[0]}.env: a process of its own has an environment of its own, and "
                "cluster.launcher=local has one for all; use cluster.launcher=ray, or leave env out"
            )

    def _check_ranks(self) -> None:
        cluster, shard = self.cluster, self.model.shard
        if cluster.ranks_per_worker > 1 and cluster.launcher == "local":
            raise ConfigError(
                f"cluster.ranks_per_worker={cluster.ranks_per_worker}: ranks are processes, which cluster.launcher="
                "local has one of; use cluster.launcher=ray"
            )
        if cluster.ranks_per_worker % cluster.context:
            raise ConfigError(
                f"cluster.context={cluster.context}: it has to divide cluster.ranks_per_worker="
                f"{cluster.ranks_per_worker}; use a number that does, or 1"
            )
        if cluster.context > 1 and self.model.compile is not None:
            raise ConfigError(
                f"cluster.context={cluster.context}: model.compile={self.model.compile} and calls whose tokens ranks "
                "share do not go together yet; use model.compile=null, or cluster.context=1"
            )
        if shard != "none" and cluster.ranks_per_worker == 1:
            raise ConfigError(
                f"model.shard={shard}: the weights are shared by the ranks of a worker, of which there is one; raise "
                "cluster.ranks_per_worker, or use model.shard=none"
            )

    def _check_gradients(self) -> None:
        algorithm = self.algorithm
        if not isinstance(algorithm, RewardGradientConfig):
            return
        if self.actor.updates > 1:
            raise ConfigError(
                f"{self.actor.said}: {algorithm.name} goes back through the steps that drew an image, which after an "
                "update are those of other weights; use 1"
            )
        if self.trainer.staleness:
            raise ConfigError(
                f"trainer.staleness={self.trainer.staleness}: {algorithm.name} goes back through the steps that drew "
                "an image, which ahead of time are those of other weights; use trainer.staleness=0"
            )
        if self.cluster.context > 1 and algorithm.carries:
            raise ConfigError(
                f"cluster.context={self.cluster.context}: {algorithm.name} needs the gradient of latents, of which "
                "ranks that share tokens have a part each; use cluster.context=1, or algorithm=draft with last=1"
            )

    def _check_staleness(self) -> None:
        given = f"trainer.staleness={self.trainer.staleness}"
        if not self.trainer.staleness:
            if getattr(self.algorithm, "decoupled", False) and self.rollout.quantize == "none":
                raise ConfigError(
                    "algorithm.decoupled=true: without trainer.staleness the weights that drew are those that a step "
                    "begins with, so that it changes nothing; leave it out, or set trainer.staleness=1 or "
                    "rollout.quantize=int8"
                )
            return
        if self.algorithm.dynamic_sampling:
            raise ConfigError(
                f"{given}: algorithm.dynamic_sampling={self.algorithm.dynamic_sampling} draws further prompts by the "
                "scores of a step, which are not there when the next one is drawn; use one of them"
            )
        if self.model.train != "lora":
            raise ConfigError(
                f"{given}: the weights of the steps before are kept for it, and with model.train={self.model.train} "
                "these are whole models; use trainer.staleness=0, or model.train=lora"
            )
        if getattr(self.algorithm, "rollout_old_after", None) is not None:
            raise ConfigError(
                f"{given}: with algorithm.rollout_old_after the old policy draws, which is late already; leave one out"
            )

    def _check_data(self) -> None:
        held_out = self.validation.data
        given = sources(self.data.train, "data.train")
        given += [] if held_out is None else sources(held_out, "validation.data")
        if self.data.stream is not None and not any(source.on_hub for source in given):
            raise ConfigError(
                f"data.stream={self.data.stream}: it is for data sets of the hub, and neither data.train nor "
                "validation.data begins with hf:; leave it out"
            )

    def _check_batches(self) -> None:
        rollout, actor, algorithm = self.rollout, self.actor, self.algorithm
        if (images := rollout.prompts_per_step * rollout.n) > MOST_IMAGES:
            raise ConfigError(
                f"rollout.prompts_per_step={rollout.prompts_per_step} times rollout.n={rollout.n} are {images} images "
                f"a trainer step, at most {MOST_IMAGES} are planned: lower one"
            )
        micro = actor.micro_batch_size
        if micro is not None and micro > rollout.micro_batch_size:
            raise ConfigError(
                f"actor.micro_batch_size={micro}: it must be at most rollout.micro_batch_size="
                f"{rollout.micro_batch_size}, whose recorded batches are replayed"
            )
        together = algorithm.drawn_together(rollout.n)
        if rollout.n % together:
            raise ConfigError(f"rollout.n={rollout.n}: {algorithm.name} compares images in pairs, use an even number")
        if rollout.micro_batch_size < together:
            what = "pair" if together == 2 else "group"
            raise ConfigError(
                f"rollout.micro_batch_size={rollout.micro_batch_size}: {algorithm.name} needs the {together} images "
                f"of a {what} in one micro-batch; raise it"
            )
        if algorithm.cfg == "off" and algorithm.replays_latents and actor.updates > 1:
            raise ConfigError(
                f"{actor.said}: with algorithm.cfg=off what the rollout recorded is "
                "not that of the unguided policy, so only the first update is on policy; use 1"
            )
        if isinstance(algorithm, AWMConfig) and not algorithm.off_policy and actor.updates > 1:
            raise ConfigError(
                f"{actor.said}: with algorithm.off_policy=false the ratio is 1 in "
                "later updates too, which are off-policy; use 1, or off_policy=true"
            )


def from_mapping(values: dict[str, Any]) -> Config:
    """The typed configuration from nested dictionaries; raises `ConfigError` naming the first key that is wrong."""
    algorithm = values.get("algorithm", {})
    if isinstance(algorithm, dict):  # without a name it is the default one
        values = {**values, "algorithm": {"name": FlowGRPOConfig.name, **algorithm}}
    model = values.get("model", {})
    if isinstance(model, dict) and isinstance(offload := model.get("offload"), bool):  # of an older version
        values = {**values, "model": {**model, "offload": "encoders" if offload else "none"}}
    _check_booleans(values)
    try:
        return _adapter().validate_python(values)
    except ValidationError as error:
        raise ConfigError(_sentence(error.errors()[0])) from None


def _check_booleans(values: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for a number that is true or false, or the other way round, which would be converted."""
    algorithm = values["algorithm"]
    known = dict(keys(BY_NAME.get(str(algorithm.get("name"))) if isinstance(algorithm, Mapping) else None))
    for name, value in _given(values):
        scorer = re.fullmatch(r"reward\.scorers\.([^.]+)\.(\w+)", name)
        f = known.get(f"reward.scorers.NAME.{scorer[2]}" if scorer else name)
        if f is not None and _is_boolean(value) != _is_boolean(f.type) and not fits(value, f.type, spelled=True):
            raise ConfigError(f"{name}={shown(value)}: it must be {kind_words(f.type)}")


def _given(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every key with its value; those of scorers one by one."""
    for block, entries in values.items():
        for leaf, value in entries.items() if isinstance(entries, Mapping) else ():
            yield f"{block}.{leaf}", value
            if (block, leaf) == ("reward", "scorers") and isinstance(value, Mapping):
                for name, own in value.items():
                    if isinstance(own, Mapping):
                        yield from ((f"reward.scorers.{name}.{key}", part) for key, part in own.items())


def _is_boolean(given: Any) -> bool:
    """Whether a value, one in a list of them, or the kind of a key is true or false."""
    return given is bool or isinstance(given, bool) or (isinstance(given, list) and any(map(_is_boolean, given)))


@functools.cache
def _adapter() -> TypeAdapter[Config]:
    """To build it takes longer than to check a configuration."""
    return TypeAdapter(Config)


def _sentence(first: ErrorDetails) -> str:
    location = [str(part) for part in first["loc"]]
    chosen = location.pop(1) if location[0] == "algorithm" and len(location) > 1 else None  # of the union
    name = ".".join(location)
    if first["type"] == "union_tag_invalid":
        *names, last = map(repr, BY_NAME)
        return f"algorithm.name={shown(first['ctx']['tag'])}: it must be {', '.join(names)} or {last}"
    if first["type"] != "unexpected_keyword_argument":
        return f"{name}={shown(first['input'])}: {expected(first, name)}"
    if chosen and (others := readers(location[-1])):
        given = first["input"]
        text = given if isinstance(given, str) else shown(given)
        return f"{name}={text:.200}: {chosen} does not read it, only {', '.join(others)}; leave it out"
    return f"{name}: there is no such key{did_you_mean(name, BY_NAME[chosen] if chosen else None)}; {LISTED}"


EXPECTED = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "a text",
    "string_pattern_mismatch": "a name of letters, digits and underscores",
    "list_type": "a list, such as [1,2]",
    "dict_type": "a dictionary, such as {NAME: VALUE}",
}  # by the type of pydantic's error


def expected(error: ErrorDetails, name: str) -> str:
    """The kind of value that is expected, in the words of somebody who writes a command line."""
    if error["type"] == "dataclass_type":
        leaf = "path" if name.startswith("reward.scorers.") else next(k for k, _ in keys() if k.startswith(f"{name}."))
        return f"it is a block of keys, set one of them, such as {name}.{leaf.removeprefix(f'{name}.')}=VALUE"
    if name == "reward.scorers":
        return "it must be a dictionary, such as {ocr: {weight: 1}}"
    if name == "logger.trackers":
        return "it must be a list, such as [tensorboard,wandb], or [] for none"
    return f"it must be {EXPECTED.get(error['type']) or error['msg'].removeprefix('Input should be ')}"


def did_you_mean(name: str, algorithm: type[AlgorithmConfig] | None = None) -> str:
    """`, did you mean 'x'` for the key nearest to `name`; else why there is none, or what its block has.

    `algorithm`: the one that is to read it; None: any.
    """
    if reason := absent(name):
        return f": {reason}"
    if near := nearest_key(name, algorithm):
        return f", did you mean {' and '.join(map(repr, near.split()))}"
    block, scorer = _block(name)
    leaves = [known.rpartition(".")[2] for known, _ in keys(algorithm) if known.rpartition(".")[0] == block]
    return f"; {block.replace('NAME', scorer)} has {', '.join(leaves)}" if block and leaves else ""


def nearest_key(name: str, algorithm: type[AlgorithmConfig] | None = None) -> str | None:
    """The key nearest to `name`, itself if it is one, None if none is near; `algorithm` as in `did_you_mean`.

    Names of other programs have gerl's for the same: several of them, separated by a space, where it has more than one.
    """
    names = [known for known, _ in keys(algorithm)]
    block, scorer = _block(name)
    leaf = name.rpartition(".")[2].lower()
    leaves = [known.rpartition(".")[2] for known in names if block and known.rpartition(".")[0] == block]
    meant = elsewhere(name, names)
    if meant and meant.startswith("algorithm.") and not set(meant.split()) <= set(names):
        meant = None  # the chosen algorithm does not read it
    if leaves:  # only the last part is compared: the common beginning would make everything look near
        if leaf in leaves:
            return f"{block}.{leaf}".replace("NAME", scorer)
        near = difflib.get_close_matches(leaf, leaves, n=1)
        if meant and (not near or name.lower() in MEANING or meant.startswith(f"{block}.")):
            return meant
        return f"{block}.{near[0]}".replace("NAME", scorer) if near else None
    inside = [known for known in names if not block and known.rpartition(".")[2] == leaf]
    if meant and (not inside or name.lower() in MEANING):
        return meant
    if inside:
        return inside[0]
    candidates = {known: known for known in names}
    if not block:  # a block, or the last part of a key
        candidates = {known.rpartition(".")[2]: known for known in reversed(names)}
        candidates |= {known: known for known in {known.split(".")[0] for known in names}}
    near = difflib.get_close_matches(name.lower(), sorted(candidates), n=1)
    if near:
        return candidates[near[0]]
    return next((known for known in names if block and known.rpartition(".")[2] == leaf), None)


def other_name(name: str) -> str | None:
    """gerl's key for what other programs call `name`, as in `nearest_key`; None for one of gerl's own, and others."""
    names = [known for known, _ in keys()]
    return None if name in names else elsewhere(name, names)


def _block(name: str) -> tuple[str, str]:
    """The block of a key, and the name of the scorer for which it has NAME."""
    block = name.rpartition(".")[0].lower()
    scorer = re.fullmatch(r"reward\.scorers\.([^.]+)", block)
    return ("reward.scorers.NAME", name.split(".")[2]) if scorer else (block, "NAME")


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
