"""The block `algorithm`: keys common to all algorithms, an algorithm's requirements, and its teachers.

Keys of a single algorithm are defined next to it in `gerl/algorithms`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

from pydantic import PlainValidator, TypeAdapter

from gerl.config.blocks import CfgMode, SamplingConfig
from gerl.config.call_arguments import REPLACED, check_call
from gerl.config.exclusions import Exclusion
from gerl.config.registry import ALGORITHMS, canonical
from gerl.config.schema import Block, key, main_key, resolved_fields, shown
from gerl.errors import ConfigError

NAME = "algorithm.teachers"
ENTRY = ("lora", "path", "data_source", "guidance", "call", "weight")


@dataclass(frozen=True)
class Teacher:
    """A teacher of denoising steps: a LoRA, another pipeline, or the base model if neither is given.

    `data_source`: value of the column `data_source` of its prompts; None for all prompts without another teacher.
    `guidance` and `call`: guidance scale and further pipeline arguments that differ from the rollout's. `weight`:
    factor of its loss.
    """

    lora: str | None = None
    path: str | None = None
    data_source: str | None = None
    guidance: float | None = None
    call: Mapping[str, Any] = field(default_factory=dict)
    weight: float = 1.0

    @property
    def changed(self) -> dict[str, Any]:
        """Pipeline arguments that differ from the rollout's."""
        guidance = {} if self.guidance is None else {"guidance_scale": self.guidance}
        return {**guidance, **self.call}

    @property
    def is_base(self) -> bool:
        """Whether the teacher is the base model."""
        return self.lora is None and self.path is None

    @property
    def name(self) -> str:
        """Name in metrics: the data source, restricted to characters that trackers accept."""
        return re.sub(r"[^\w .:-]", "_", self.data_source or "others")

    def __str__(self) -> str:
        model = self.lora or self.path or "the base model"
        changes = "".join(f", {name}={shown(value)}" for name, value in self.changed.items())
        prompts = "" if self.data_source is None else f" for prompts of {self.data_source}"
        return f"{model}{changes}{prompts}"


def teachers(entries: Sequence[Mapping[str, Any]]) -> list[Teacher]:
    """Parse the value of `algorithm.teachers`. Raises `ConfigError` for an invalid or duplicate entry."""
    parsed = [_teacher(entry) for entry in entries]
    sources = [teacher.data_source for teacher in parsed]
    if twice := next((teacher for teacher in parsed if sources.count(teacher.data_source) > 1), None):
        prompts = f"data_source={twice.data_source}" if twice.data_source else "no data_source, which means all"
        raise ConfigError(f"{NAME} has two entries with {prompts}: use one for each kind of prompt")
    return parsed


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
    check_call(call, f"{NAME}: call.", REPLACED)
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


# --- Requirements that an algorithm declares

Unit = Literal["image", "pair", "group"]


@dataclass(frozen=True)
class Needs:
    """Requirements of an algorithm for sampler, tape, workers and other keys.

    Example: `Needs(trajectory=True, ratio=True)` for a policy gradient on the recorded steps.
    """

    trajectory: bool = False  # trains on latents of recorded steps; otherwise on re-noised final images
    ratio: bool = False  # has a ratio to recorded log-probabilities, which is 1 on policy
    noise: bool = False  # needs stochastic steps, since others have no log-probability
    recorded_means: bool = False  # the tape keeps the step means
    finished_latents: bool = False  # the tape keeps the final latents in addition to those of trained steps
    loss_over: Unit = "image"  # images whose losses depend on each other
    sampled_over: Unit = "image"  # images that must be in the same rollout micro-batch
    single_images: bool = False  # whether a prompt may have a single image
    files: bool = False  # trains only on images from files
    values: bool = False  # a critic gives a value to the latents of each trained step
    tree: bool = False  # trajectories branch; the tree determines the stochastic steps
    reward_gradient: bool = False  # differentiates the reward
    latent_gradient: bool = False  # needs gradients of step latents in addition to the weights
    imitation: float = 0.0  # alpha, relative to the LoRA's, of a second LoRA that imitates images; 0: none
    base_model: bool = False  # the loss compares with the base model, even without a KL
    start_weights: bool = False  # compares with the weights at the start of a trainer step
    old_decay: Sequence[float] | None = None  # old policy, see `core_algos.decay_at`; None: no old policy
    rollout_decay: Sequence[float] | None = None  # averaged sampling weights; None: the trained weights sample
    rollout_old_after: int | None = None  # trainer step after which the old policy samples; None: never
    deterministic: bool = False  # defined only for steps without noise
    leaps: bool = False  # leaps between noise levels, which only flow matching has
    min_steps: int = 1  # minimum denoising steps
    teachers: "tuple[Teacher, ...]" = ()  # models whose denoising steps it learns

    @property
    def whole_groups(self) -> bool:
        """Whether the loss of an image depends on other images of its group."""
        return self.loss_over != "image"

    def loss_images(self, n: int) -> int:
        """Return the number of images of a group of `n` that the loss of one image depends on."""
        return {"image": 1, "pair": 2, "group": n}[self.loss_over]

    def sampled_images(self, n: int) -> int:
        """Return the number of images of a group of `n` that must be in the same rollout micro-batch."""
        return {"image": 1, "pair": 2, "group": n}[self.sampled_over]


def cfg_key(default: CfgMode) -> Any:
    halves = "gradient through both halves; only the conditional one; or off (CFG distillation)"
    return main_key(default, f"guidance in the update: {halves}")


@dataclass(frozen=True)
class AlgorithmConfig(Block):
    """Keys common to all algorithms."""

    excludes: ClassVar[tuple[Exclusion, ...]] = ()  # in addition to the table in `exclusions`

    name: str = main_key(
        "", "the algorithm; `algorithm=NAME` on the command line selects it with the settings of its preset"
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
        0, "trainer steps after which the current weights replace the base model in the KL (GARDO: 15); 0: never", low=0
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
        return _restored, (self.path, ALGORITHMS.source(self.path), values)  # another process must load the file first

    @property
    def needs(self) -> Needs:
        """Requirements of the algorithm with these keys; subclasses replace fields of `super().needs`."""
        return Needs()

    def clip_range(self, dimensions: int) -> tuple[float, float] | None:
        """Return the ratio's bounds as distances below and above 1, for latents of `dimensions`; None if unbounded."""
        del dimensions
        return None

    @property
    def subtracts_kl(self) -> bool:
        """Whether the KL to the base model is subtracted from the rewards instead of added to the loss."""
        return False

    @property
    def moves_reference(self) -> bool:
        """Whether newer weights may replace the base model in the KL during the run."""
        return self.kl_reset_every > 0 or self.kl_reset_above is not None

    def check_sampling(self, sampling: SamplingConfig) -> None:
        """Raise `ConfigError` if the algorithm cannot learn from samples of `sampling`."""


def algorithm_config(name: str = "flow_grpo", **keys: Any) -> AlgorithmConfig:
    """Return the configuration of the algorithm `name` with `keys`. Raises `KeyError` for an unknown name."""
    settings: Callable[..., AlgorithmConfig] = ALGORITHMS[name].config_class
    return settings(name, **keys)


@cache
def _adapter(settings: type[AlgorithmConfig]) -> TypeAdapter[AlgorithmConfig]:
    resolved_fields(settings)
    return TypeAdapter(settings)


def settings_class(block: Any) -> type[AlgorithmConfig] | None:
    """Return the class of a block `algorithm`, by its `path` or `name`; None if there is no such algorithm."""
    path, name = (block.get(key) if isinstance(block, Mapping) else None for key in ("path", "name"))
    if isinstance(path, str):
        return ALGORITHMS.load(path).config_class
    return ALGORITHMS[name].config_class if isinstance(name, str) and name in ALGORITHMS else None


def with_own_name(block: dict[str, Any]) -> dict[str, Any]:
    """Return a block `algorithm` with the name of the class in the file at its `path`; unchanged without a path."""
    if not isinstance(path := block.get("path"), str):
        return block
    names = ALGORITHMS.load(path).names.split()
    name = block.get("name") if block.get("name") in names else names[0]
    return {**block, "name": name, "path": canonical(path)}


def _validated(values: Any) -> AlgorithmConfig:
    """Validate the block `algorithm` with the class of its `name`, or of the file at its `path`."""
    if isinstance(values, AlgorithmConfig):
        return values
    if not isinstance(values, dict):
        raise ConfigError(f"algorithm={shown(values)}: expected a dictionary of keys; choose one with algorithm=NAME")
    if (settings := settings_class(values)) is None:
        raise UnknownAlgorithm(values["name"])
    adapter = _adapter(settings)  # type: ignore[arg-type]  # mypy confuses the hash of an instance with the class's
    return adapter.validate_python(with_own_name(values))


def _restored(path: str, source: bytes | type, values: dict[str, Any]) -> AlgorithmConfig:
    settings: Callable[..., AlgorithmConfig] = ALGORITHMS.load(path, source).config_class
    return settings(**values)


class UnknownAlgorithm(Exception):
    """`algorithm.name` is unknown; the argument is its value."""


AnyAlgorithm = Annotated[AlgorithmConfig, PlainValidator(_validated)]
