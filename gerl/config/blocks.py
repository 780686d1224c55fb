"""The other blocks: model, rollout, actor, reward, data, validation, checkpoint, cluster, logger, trainer."""

from dataclasses import dataclass
from typing import Any, Literal

from gerl.config.schema import Block, key
from gerl.errors import ConfigError


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
class RolloutConfig(Block):
    prompts_per_step: int = key(8, "prompts (groups) sampled per trainer step", low=1)
    n: int = key(12, "images per prompt: the group whose rewards are compared", low=1)
    micro_batch_size: int = key(16, "images denoised together on one worker", low=1)


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
