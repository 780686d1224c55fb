"""The block `algorithm`: the keys that every algorithm reads, what an algorithm declares, and its teachers.

The keys of a single algorithm stand beside it in `gerl/algorithms`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

from pydantic import PlainValidator, TypeAdapter

from gerl.config.blocks import CfgMode, SamplingConfig
from gerl.config.exclusions import Exclusion
from gerl.config.registry import ALGORITHMS, canonical
from gerl.config.schema import Block, key, main_key, resolved_fields, shown
from gerl.errors import ConfigError

# --- The teachers of a distillation, `algorithm.teachers`: LoRAs, other pipelines, or the base model

NAME = "algorithm.teachers"
ENTRY = ("lora", "path", "data_source", "guidance", "call", "weight")


@dataclass(frozen=True)
class Teacher:
    """A model whose denoising steps a student learns: a LoRA, another pipeline, or with neither the base model.

    `data_source`: the prompts it teaches, by their column of that name; None: all that no other teacher does.
    `guidance` and `call`: guidance scale and further arguments of the pipeline that it computes with, where they are
    not the rollout's. `weight`: factor of its loss.
    """

    lora: str | None = None
    path: str | None = None
    data_source: str | None = None
    guidance: float | None = None
    call: Mapping[str, Any] = field(default_factory=dict)
    weight: float = 1.0

    @property
    def changed(self) -> dict[str, Any]:
        """The arguments of the pipeline that are not the rollout's."""
        guidance = {} if self.guidance is None else {"guidance_scale": self.guidance}
        return {**guidance, **self.call}

    @property
    def is_base(self) -> bool:
        """Whether it is the base model."""
        return self.lora is None and self.path is None

    @property
    def name(self) -> str:
        """The name of its metrics: that of its prompts, as trackers take it."""
        return re.sub(r"[^\w .:-]", "_", self.data_source or "others")

    def __str__(self) -> str:
        model = self.lora or self.path or "the base model"
        given = "".join(f", {name}={shown(value)}" for name, value in self.changed.items())
        prompts = "" if self.data_source is None else f" for prompts of {self.data_source}"
        return f"{model}{given}{prompts}"


def teachers(given: Sequence[Mapping[str, Any]]) -> list[Teacher]:
    """The teachers that the value of `algorithm.teachers` stands for; raises `ConfigError` for anything else."""
    found = [_teacher(entry) for entry in given]
    sources = [teacher.data_source for teacher in found]
    if twice := next((teacher for teacher in found if sources.count(teacher.data_source) > 1), None):
        prompts = f"data_source={twice.data_source}" if twice.data_source else "no data_source, which means all"
        raise ConfigError(f"{NAME} has two entries with {prompts}: use one for each kind of prompt")
    return found


def _teacher(entry: Mapping[str, Any]) -> Teacher:
    where = f"{NAME} has an entry with"
    for k, value in entry.items():
        if k not in ENTRY:
            raise ConfigError(f"{where} {k}; allowed are {', '.join(ENTRY)}")
        if k in ("lora", "path", "data_source") and value is not None and not _is_text(value):
            raise ConfigError(f"{where} {k}={shown(value)}: it must be a non-empty string")
    call = entry.get("call") or {}
    if not isinstance(call, Mapping) or not all(map(_is_text, call)):
        raise ConfigError(
            f"{where} call={shown(call)}: expected arguments of the pipeline, such as {{true_cfg_scale: 4}}"
        )
    if entry.get("lora") is not None and entry.get("path") is not None:
        raise ConfigError(f"{where} lora and path: a teacher has only one of them; merge the LoRA into that pipeline")
    guidance, weight = entry.get("guidance"), entry.get("weight", 1.0)
    if guidance is not None and not _is_number(guidance, low=0.0):
        raise ConfigError(f"{where} guidance={shown(guidance)}: it must be a number of at least 0")
    if not (_is_number(weight, low=0.0) and weight > 0):
        raise ConfigError(f"{where} weight={shown(weight)}: it must be a number above 0")
    return Teacher(
        entry.get("lora"),
        entry.get("path"),
        entry.get("data_source"),
        None if guidance is None else float(guidance),
        dict(call),
        float(weight),
    )


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_number(value: object, low: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value < 1e9


# --- What an algorithm declares

Unit = Literal["image", "pair", "group"]


@dataclass(frozen=True)
class Needs:
    """What an algorithm needs from sampler, tape, workers and the other keys.

    Example: `Needs(trajectory=True, ratio=True)` for a policy gradient on the recorded steps.
    """

    trajectory: bool = False  # trains at the latents of the recorded steps; else at finished images noised again
    ratio: bool = False  # its ratio to the recorded log-probabilities is 1 on policy
    noise: bool = False  # steps without noise have no log-probability
    recorded_means: bool = False  # the tape keeps the means of the steps
    finished_latents: bool = False  # the tape keeps the finished latents besides those of the trained steps
    loss_over: Unit = "image"  # the images whose losses depend on each other
    sampled_over: Unit = "image"  # the images that one micro-batch of the rollout has to hold
    single_images: bool = False  # a prompt may have a single image
    files: bool = False  # trains on images of files only
    tree: bool = False  # trajectories branch: the tree says which steps are stochastic
    reward_gradient: bool = False  # differentiates the reward
    latent_gradient: bool = False  # differentiates the latents of a step as well, not only the weights
    imitation: float = 0.0  # trains a second LoRA of this alpha, relative to the first's, that imitates the images
    base_model: bool = False  # the loss compares with the base model, even without a KL
    start_weights: bool = False  # compares with the weights at the start of a step
    old_decay: Sequence[float] | None = None  # of the old policy, see `core_algos.decay_at`; None: none is kept
    rollout_decay: Sequence[float] | None = None  # of the averaged weights that sample; None: the trained ones do
    rollout_old_after: int | None = None  # trainer steps after which the old policy samples; None: never
    deterministic: bool = False  # defined for steps without noise only
    min_steps: int = 1  # denoising steps
    teachers: "tuple[Teacher, ...]" = ()  # the models whose denoising steps it learns

    @property
    def whole_groups(self) -> bool:
        """Whether the loss of an image depends on others of its group."""
        return self.loss_over != "image"

    def loss_images(self, n: int) -> int:
        """How many of the `n` images of a group the loss of one depends on."""
        return {"image": 1, "pair": 2, "group": n}[self.loss_over]

    def sampled_images(self, n: int) -> int:
        """How many of the `n` images of a group a micro-batch of the rollout has to hold."""
        return {"image": 1, "pair": 2, "group": n}[self.sampled_over]


def cfg_key(default: CfgMode) -> Any:
    halves = "gradient through both halves; only the conditional one; or off (CFG distillation)"
    return main_key(default, f"guidance in the update: {halves}")


@dataclass(frozen=True)
class AlgorithmConfig(Block):
    """The keys that every algorithm reads."""

    excludes: ClassVar[tuple[Exclusion, ...]] = ()  # what it does not go with, besides the table of `exclusions`

    name: str = main_key(
        "", "the algorithm; `algorithm=NAME` on the command line selects it with its published settings"
    )
    path: str | None = key(
        None, "Python file with an algorithm of your own; `algorithm=NAME` then gives the other settings to begin with"
    )
    cfg: CfgMode = cfg_key("joint")
    kl_coef: float = main_key(0.0, "weight of the distance to the base model; at 0 no reference pass is run", low=0)
    kl_share: float = key(
        1.0,
        "share of a step's images whose distance to the base model counts: those whose reward ranks highest above "
        "their watched scores (GARDO: 0.1; it adapts between a fifth and twice of this); 1: all",
        above=0,
        high=1,
    )
    kl_doubters: list[str] = key([], "the watched scorers that algorithm.kl_share consults; []: all with weight 0")
    kl_reset_every: int = key(
        0,
        "trainer steps after which the current weights replace the base model in the KL (GARDO: 15); 0: never",
        low=0,
    )
    kl_reset_above: float | None = key(
        None,
        "the same after a step whose mean KL was above this (GARDO: 3e-4 for OCR with SD3.5); null: never",
        above=0,
    )
    advantage_clip: float = key(5.0, "advantages are clipped to +- this", above=0)
    data_coef: float = key(
        0.0, "weight of imitating the images of data.regularise, which keep the policy close to them (DDRL)", low=0
    )
    dynamic_sampling: int = key(
        0, "times a step samples further prompts to replace groups whose rewards are all equal (DAPO)", low=0
    )

    def _path(self, name: str) -> str:
        return f"algorithm.{name}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.path is None:
            return super().__reduce_ex__(protocol)
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return _restored, (self.path, ALGORITHMS.source(self.path), values)  # other processes have not loaded the file

    @property
    def needs(self) -> Needs:
        """What the algorithm needs with these keys; subclasses replace fields of `super().needs`."""
        return Needs()

    def clip_range(self, dimensions: int) -> tuple[float, float] | None:
        """How far below and above 1 the ratio may go, for latents of so many dimensions; None: unbounded."""
        del dimensions
        return None

    @property
    def subtracts_kl(self) -> bool:
        """Whether the KL to the base model is subtracted from the rewards rather than added to the loss."""
        return False

    @property
    def moves_reference(self) -> bool:
        """Whether other weights take the base model's place in the KL while the run goes on."""
        return self.kl_reset_every > 0 or self.kl_reset_above is not None

    def check_sampling(self, sampling: SamplingConfig) -> None:
        """Raise `ConfigError` if it cannot learn from what `sampling` samples."""


def algorithm_config(name: str = "flow_grpo", **keys: Any) -> AlgorithmConfig:
    """Return the configuration of the algorithm `name` with `keys`; raises `KeyError` for an unknown name."""
    settings: Callable[..., AlgorithmConfig] = ALGORITHMS[name].config_class
    return settings(name, **keys)


@cache
def _adapter(settings: type[AlgorithmConfig]) -> TypeAdapter[AlgorithmConfig]:
    resolved_fields(settings)
    return TypeAdapter(settings)


def settings_class(block: Any) -> type[AlgorithmConfig] | None:
    """Return the class of a block `algorithm`, by its `path` or its `name`; None if there is no such algorithm."""
    path, name = (block.get(key) if isinstance(block, Mapping) else None for key in ("path", "name"))
    if isinstance(path, str):
        return ALGORITHMS.load(path).config_class
    return ALGORITHMS[name].config_class if isinstance(name, str) and name in ALGORITHMS else None


def with_own_name(block: dict[str, Any]) -> dict[str, Any]:
    """Return a block `algorithm` with the name of the class in the file at its `path`, if it has one."""
    if not isinstance(path := block.get("path"), str):
        return block
    names = ALGORITHMS.load(path).names.split()
    name = block.get("name") if block.get("name") in names else names[0]
    return {**block, "name": name, "path": canonical(path)}


def _validated(given: Any) -> AlgorithmConfig:
    """Validate the block `algorithm` with the class of its `name`, or of the file at its `path`."""
    if isinstance(given, AlgorithmConfig):
        return given
    if not isinstance(given, dict):
        raise ConfigError(f"algorithm={shown(given)}: expected a dictionary of keys; choose one with algorithm=NAME")
    if (settings := settings_class(given)) is None:
        raise UnknownAlgorithm(given["name"])
    adapter = _adapter(settings)  # type: ignore[arg-type]  # mypy takes the hash of an instance for the class's
    return adapter.validate_python(with_own_name(given))


def _restored(path: str, source: bytes | type, values: dict[str, Any]) -> AlgorithmConfig:
    """Restore the configuration of an algorithm of the user in another process."""
    settings: Callable[..., AlgorithmConfig] = ALGORITHMS.load(path, source).config_class
    return settings(**values)


class UnknownAlgorithm(Exception):
    """`algorithm.name` is no algorithm; the argument is its value."""


AnyAlgorithm = Annotated[AlgorithmConfig, PlainValidator(_validated)]
