"""Every key, default, range and explanation of gerl's configuration, once.

The tree is flat: one dataclass a block, composed by Hydra (`configs/`), checked here before any work is done.
"""

import dataclasses
import difflib
import math
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from gerl.errors import ConfigError

GROUP_ALGORITHMS = ("flow_grpo",)


def key(
    default: Any, help: str, *, low: float | None = None, high: float | None = None, above: float | None = None
) -> Any:
    """A configuration key: its default, its explanation (shown by `--help`) and its range (`above` is exclusive)."""
    metadata = {"help": help, "low": low, "high": high, "above": above}
    if isinstance(default, dict | list):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


class Block:
    """Checks the ranges given to `key`; blocks add what concerns several of their keys in `check`."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, f.name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            low, high, above = (f.metadata.get(bound) for bound in ("low", "high", "above"))
            if not math.isfinite(value):
                raise ConfigError(f"{self._path(f.name)}={value}: it must be a finite number")
            if low is not None and value < low:
                raise ConfigError(f"{self._path(f.name)}={value}: it must be at least {low}")
            if high is not None and value > high:
                raise ConfigError(f"{self._path(f.name)}={value}: it must be at most {high}")
            if above is not None and value <= above:
                raise ConfigError(f"{self._path(f.name)}={value}: it must be greater than {above}")
        self.check()

    def _path(self, name: str) -> str:
        block = type(self).__name__.removesuffix("Config").lower()
        return f"{'reward.scorers.NAME' if block == 'scorer' else block}.{name}"

    def check(self) -> None:
        """Raise `ConfigError` where keys of the block contradict each other."""


@dataclass(frozen=True)
class ModelConfig(Block):
    path: str = key("signs", "diffusers pipeline: hub id, folder, or 'signs' (the small SD3 that ships with gerl)")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = key(
        "auto",
        "precision of the frozen weights; auto is bfloat16 on a GPU and float32 on a CPU; LoRA is always float32",
    )
    lora_rank: int = key(32, "LoRA rank", low=1)
    lora_alpha: float = key(64.0, "LoRA alpha: the update is scaled by alpha / rank", above=0)
    lora_targets: str | None = key(
        None, "regular expression on names of linear layers; null: attention and feed-forward of the repeated blocks"
    )
    gradient_checkpointing: bool = key(False, "recompute activations in the backward pass: less memory, more time")
    compile: bool = key(False, "torch.compile the denoiser")
    compile_backend: str = key("inductor", "torch.compile backend")


@dataclass(frozen=True)
class SamplingConfig(Block):
    height: int | None = key(None, "image height in pixels; null: the pipeline's own default", low=8)
    width: int | None = key(None, "image width in pixels; null: the pipeline's own default", low=8)
    num_inference_steps: int = key(10, "denoising steps of a training rollout", low=2)
    guidance_scale: float | None = key(None, "passed to the pipeline; null: the pipeline's own default", low=0)
    kernel: Literal["flow_sde", "dance_sde", "cps", "precise", "dance_precise", "ddim"] = key(
        "flow_sde", "transition kernel of the stochastic steps; ddim also for epsilon-prediction DDIM pipelines"
    )
    noise_level: float = key(0.7, "noise of the stochastic steps (eta of the kernel's paper)", low=0)
    window_size: int | None = key(
        None, "number of consecutive stochastic (trained) steps; null: all but the last", low=1
    )
    window_range: list[int] | None = key(
        None, "[first, end) of the steps a window may cover, drawn once a trainer step; null: all but the last"
    )
    call: dict[str, Any] = key({}, "further keyword arguments of the pipeline's __call__, such as max_sequence_length")

    def check(self) -> None:
        if self.kernel == "cps" and self.noise_level > 1:
            raise ConfigError(f"sampling.noise_level={self.noise_level}: cps takes at most 1, which re-noises fully")
        last = self.num_inference_steps - 1
        if self.window_range is not None:
            if len(self.window_range) != 2 or not 0 <= self.window_range[0] < self.window_range[1]:
                raise ConfigError(
                    f"sampling.window_range={list(self.window_range)}: give [first, end) with 0 <= first < end"
                )
            if self.window_range[1] > last:
                raise ConfigError(
                    f"sampling.window_range={list(self.window_range)}: it covers step {last}, the last of "
                    f"{self.num_inference_steps}, which has no noise and no log-probability; end at {last} or before"
                )
        if self.window_size is not None:
            first, end = self.steps_range
            if self.window_size > end - first:
                raise ConfigError(
                    f"sampling.window_size={self.window_size}: only {end - first} steps lie in [{first}, {end}) (the "
                    "last step is deterministic); lower it or widen sampling.window_range"
                )

    @property
    def steps_range(self) -> tuple[int, int]:
        """[first, end) of the steps that may be stochastic."""
        first, end = self.window_range or (0, self.num_inference_steps - 1)
        return first, end

    @property
    def trained_steps(self) -> int:
        """Number of stochastic steps of a rollout."""
        first, end = self.steps_range
        return self.window_size or end - first


@dataclass(frozen=True)
class RolloutConfig(Block):
    prompts_per_step: int = key(8, "prompts (groups) sampled per trainer step", low=1)
    n: int = key(12, "images per prompt: the group whose rewards are compared", low=1)
    micro_batch_size: int = key(16, "images denoised together on one worker", low=1)


@dataclass(frozen=True)
class AlgorithmConfig(Block):
    name: Literal["flow_grpo"] = key("flow_grpo", "the algorithm")
    advantage_std: Literal["group", "batch", "none"] = key(
        "group", "what the centred rewards are divided by: the group's std, the batch's, or nothing (Dr. GRPO)"
    )
    leave_one_out: bool = key(False, "baseline of a sample is the mean of its group's other members (RLOO)")
    advantage_clip: float = key(5.0, "advantages are clipped to +- this", above=0)
    clip_low: float = key(1e-4, "PPO clip: lower bound of the ratio is 1 - this", above=0, high=1)
    clip_high: float = key(1e-4, "PPO clip: upper bound of the ratio is 1 + this", above=0)
    kl_coef: float = key(0.0, "weight of the KL to the base model in the loss; at 0 no reference pass is run", low=0)


@dataclass(frozen=True)
class ActorConfig(Block):
    lr: float = key(3e-4, "AdamW learning rate", above=0)
    lr_schedule: Literal["constant", "linear", "cosine"] = key("constant", "learning-rate schedule after the warm-up")
    warmup_steps: int = key(0, "optimizer steps over which the learning rate rises from 0", low=0)
    betas: list[float] = key([0.9, 0.999], "AdamW betas")
    eps: float = key(1e-8, "AdamW epsilon", above=0)
    weight_decay: float = key(1e-4, "AdamW weight decay", low=0)
    max_grad_norm: float = key(1.0, "gradient norm is clipped to this", above=0)
    updates_per_step: int = key(1, "optimizer steps per trainer step; all but the first are off-policy", low=1)
    micro_batch_size: int | None = key(
        None, "images per forward and backward; null: as in the rollout. It changes memory, never the gradient", low=1
    )
    ema_decay: float = key(
        0.9, "EMA of the LoRA used for validation and export, warmed up; 0: the raw weights", low=0, high=1
    )
    max_ratio_deviation: float | None = key(
        None,
        "the run stops if max |ratio - 1| exceeds this before the step's first optimizer step; null: 1e-3, or 2e-2 "
        "with base weights in half precision, where another batch size rounds differently",
        above=0,
    )
    max_nonfinite_updates: int = key(
        3, "updates with non-finite gradients that are skipped before the run stops", low=0
    )

    def check(self) -> None:
        if len(self.betas) != 2 or not all(0 <= b < 1 for b in self.betas):
            raise ConfigError(f"actor.betas={list(self.betas)}: give two numbers in [0, 1)")


@dataclass(frozen=True)
class ScorerConfig(Block):
    weight: float = key(1.0, "factor of this scorer in the total reward; 0: watched only")
    path: str | None = key(None, "Python file of your own scorer; null: a scorer of gerl with this entry's name")
    function: str = key(
        "compute_score", "function in that file: (images, prompts, metadata, **kwargs) -> list of float"
    )
    kwargs: dict[str, Any] = key({}, "keyword arguments of the scorer")


@dataclass(frozen=True)
class RewardConfig(Block):
    scorers: dict[str, ScorerConfig] = key({}, "name -> scorer; the total is the weighted sum")
    on_error: Literal["drop_group", "stop"] = key(
        "drop_group", "what a scorer that fails after its retries does: drop the sample's group, or stop the run"
    )
    retries: int = key(1, "times a failed scoring call is repeated", low=0)

    def check(self) -> None:
        if not any(scorer.weight for scorer in self.scorers.values()):
            raise ConfigError("reward.scorers has no scorer with a weight: name one, such as '+reward.scorers.ocr={}'")
        if "reward" in self.scorers:
            raise ConfigError("reward.scorers.reward: this name is taken by the total, choose another")


@dataclass(frozen=True)
class DataConfig(Block):
    train: str = key("signs_train", "training prompts: .txt, .jsonl or .parquet file, or the name of a list of gerl's")
    shuffle: bool = key(True, "shuffle the prompts every epoch")
    prompt_key: str = key("prompt", "column of the prompt in .jsonl and .parquet rows; other columns are metadata")


@dataclass(frozen=True)
class ValidationConfig(Block):
    data: str | None = key("signs_val", "held-out prompts, in the same formats as data.train; null: no validation")
    every: int = key(10, "trainer steps between validations; 0: only at the start and the end", low=0)
    max_prompts: int | None = key(None, "use only the first so many prompts; null: all", low=1)
    num_inference_steps: int | None = key(None, "denoising steps; null: as in sampling", low=1)
    guidance_scale: float | None = key(None, "guidance scale; null: as in sampling", low=0)
    seed: int = key(42, "seed of the fixed noise of each prompt", low=0)
    micro_batch_size: int = key(32, "images denoised together", low=1)


@dataclass(frozen=True)
class CheckpointConfig(Block):
    every: int = key(10, "trainer steps between checkpoints; 0: only at the end", low=0)
    keep: int = key(2, "newest checkpoints kept; the one with the best validation reward is kept besides", low=1)
    resume: str = key(
        "never", "'auto': carry on the newest unfinished run of this experiment; or a run folder; 'never': start anew"
    )


@dataclass(frozen=True)
class ClusterConfig(Block):
    launcher: Literal["ray", "local"] = key("ray", "workers as Ray actors, or in this process")
    num_workers: int | None = key(
        None,
        "rollout and actor workers; null: one per GPU; on a CPU two over Ray (if it has two cores), one in process",
        low=1,
    )
    num_reward_workers: int = key(1, "processes that score images", low=1)
    device: Literal["auto", "cpu", "cuda"] = key("auto", "device of the workers; auto is cuda where there is one")
    threads_per_worker: int | None = key(None, "CPU threads of a worker; null: its share of the cores", low=1)


@dataclass(frozen=True)
class LoggerConfig(Block):
    tensorboard: bool = key(True, "write TensorBoard event files to the run folder")
    progress: bool = key(True, "show a progress bar")
    grid_images: int = key(32, "images in a sample grid", low=1)


@dataclass(frozen=True)
class TrainerConfig(Block):
    steps: int = key(100, "trainer steps (rollout, score, update)", low=1)
    seed: int = key(0, "seed of everything drawn: LoRA, prompt order, noise, windows", low=0)


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
        if self.algorithm.name in GROUP_ALGORITHMS and self.rollout.n < 2:
            raise ConfigError(
                f"rollout.n={self.rollout.n}: {self.algorithm.name} compares images of the same prompt, use at least 2"
            )
        if self.sampling.noise_level == 0:
            raise ConfigError(
                f"sampling.noise_level=0: {self.algorithm.name} is a policy gradient and needs stochastic steps; "
                "use a value above 0, such as 0.7"
            )
        micro = self.actor.micro_batch_size
        if micro is not None and micro > self.rollout.micro_batch_size:
            raise ConfigError(
                f"actor.micro_batch_size={micro}: it must be at most rollout.micro_batch_size="
                f"{self.rollout.micro_batch_size}, whose recorded batches are replayed"
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
