"""The other blocks: rollout, actor, reward, validation, checkpoint, cluster, logger, trainer."""

import re
from dataclasses import dataclass
from typing import Any, Literal

from gerl.config.choices import DrawingPrecision, LrSchedule, Optimizer, RewardNormalisation, RunParts, TrackerName
from gerl.config.data import Given, sources
from gerl.config.schema import Block, key, main_key, shown
from gerl.errors import ConfigError

FULL = 10  # a LoRA's learning rate is so many times that of the weights themselves


@dataclass(frozen=True)
class RolloutConfig(Block):
    prompts_per_step: int = main_key(8, "prompts (groups) sampled per trainer step", low=1)
    n: int = main_key(12, "images per prompt; the rewards of such a group are compared", low=1)
    micro_batch_size: int = main_key(16, "images denoised together on one worker", low=1)
    quantize: DrawingPrecision = key(
        "none",
        "frozen layers compute in 8 bits during sampling, in their usual precision during training: int8, or fp8 "
        "on a GPU that supports it (torchao); the sampling policy then differs, and the ratio corrects for it",
    )


@dataclass(frozen=True)
class ActorConfig(Block):
    optimizer: Optimizer = key(
        "adamw",
        "adamw, or adamw8bit: its moments in 8 bits, a quarter of the memory (requires the package bitsandbytes)",
    )
    lr: float = main_key(3e-4, "AdamW learning rate of the LoRA", above=0)
    full_lr: float | None = key(
        None, "AdamW learning rate if model.train is not lora; null: a tenth of actor.lr", above=0
    )
    lr_schedule: LrSchedule = key("constant", "learning-rate schedule after the warm-up")
    warmup_steps: int = key(0, "optimizer steps over which the learning rate rises from 0", low=0)
    betas: list[float] = key([0.9, 0.999], "AdamW betas")
    eps: float = key(
        1e-8,
        "AdamW epsilon, added to the root of the second moment: gradients well below it have almost no effect",
        above=0,
    )
    weight_decay: float = key(1e-4, "AdamW weight decay", low=0)
    max_grad_norm: float = key(1.0, "maximum gradient norm for clipping", above=0)
    updates_per_step: int = main_key(1, "optimizer steps per trainer step; all but the first are off-policy", low=1)
    epochs: int = key(1, "passes over a step's images, each in actor.updates_per_step optimizer steps", low=1)
    micro_batch_size: int | None = main_key(
        None, "images per forward and backward pass; null: as in the rollout. Affects memory, never the gradient", low=1
    )
    step_batch: int = key(
        1, "trained denoising steps per forward and backward pass; memory grows with their number", low=1
    )
    ema_decay: float = main_key(
        0.9, "EMA of the LoRA used for validation and export, with warm-up; 0: the raw weights", low=0, high=1
    )
    max_ratio_deviation: float | None = key(
        None,
        "the run stops if max |ratio - 1| exceeds this before the step's first optimizer step; null: 1e-3, or 2e-2 "
        "with base weights in half precision, where another batch size rounds differently",
        above=0,
    )

    @property
    def updates(self) -> int:
        """Optimizer steps of a trainer step."""
        return self.updates_per_step * self.epochs

    @property
    def said(self) -> str:
        """The keys that make `updates` more than one, with their values."""
        chosen = {"updates_per_step": self.updates_per_step, "epochs": self.epochs}
        return " ".join(f"actor.{name}={value}" for name, value in chosen.items() if value > 1)

    def rate(self, train: str) -> float:
        """The learning rate for `model.train`."""
        return self.lr if train == "lora" else self.full_lr or self.lr / FULL

    def check(self) -> None:
        if len(self.betas) != 2 or not all(0 <= b < 1 for b in self.betas):
            raise ConfigError(f"actor.betas={list(self.betas)}: give two numbers in [0, 1)")


@dataclass(frozen=True)
class ScorerConfig(Block):
    weight: float = main_key(1.0, "weight of this scorer in the total reward; 0: watched only")
    path: str | None = main_key(
        None, "Python file of a custom scorer; null: the built-in scorer with this entry's name"
    )
    function: str = key(
        "compute_score", "function in that file: (images, prompts, metadata, **kwargs) -> list of float"
    )
    kwargs: dict[str, Any] = main_key({}, "keyword arguments of the scorer")
    scale: float = key(1.0, "the score enters the total as clip(scale * score + offset), times the weight")
    offset: float = key(0.0, "see scale")
    clip: list[float] | None = key(None, "[low, high]: limits of scale * score + offset; null: none")
    normalise: RewardNormalisation = key(
        "none",
        "in training, before the sum: mean 0 and deviation 1 among the images of a prompt (group) or of the step "
        "(batch), or the share of the prompt's other images that it beats (rank)",
    )
    success: float | None = key(None, "log the share of images with at least this score as NAME/success_rate")
    data_sources: list[str] | None = key(
        None, "score only prompts whose column data_source has one of these values; null: all"
    )
    during: RunParts = key("both", "with weight 0: score only training images, or only validation images")
    replicas: int = key(1, "processes of this scorer; CLIP scorers with the same weights share theirs", low=1)
    gpus: float = main_key(0.0, "share of a GPU for each of them; 0: CPU", low=0, high=1)
    timeout: float = key(600.0, "seconds after which a call counts as hung and its process is restarted", above=0)
    env: dict[str, Any] = key(
        {},
        "environment of its processes, created by Ray at start: {uv: [PACKAGE, ...]} or {pip: [PACKAGE, ...]} on "
        "top of this one, or {python: PATH} for an existing one; {}: this one",
    )

    def check(self) -> None:
        if self.clip is not None and not (len(self.clip) == 2 and self.clip[0] < self.clip[1]):
            raise ConfigError(f"reward.scorers.NAME.clip={list(self.clip)}: expected two numbers, the lower one first")
        if self.data_sources is not None and not self.data_sources:
            raise ConfigError("reward.scorers.NAME.data_sources=[]: name at least one, or use null for all prompts")
        if self.weight and self.during != "both":
            raise ConfigError(
                f"reward.scorers.NAME.during={self.during}: only a watched scorer may skip part of the run, and "
                "this one has a weight; set its weight to 0, or remove during"
            )
        if self.env and not is_environment(self.env):
            raise ConfigError(
                f"reward.scorers.NAME.env={shown(self.env)}: expected one of {{uv: [PACKAGE, ...]}}, {{pip: "
                "[PACKAGE, ...]} and {python: PATH}"
            )


def is_environment(env: dict[str, Any]) -> bool:
    """Whether `env` names packages for uv or for pip, or the path of an interpreter."""
    match env:
        case {"uv": [*packages], **rest} | {"pip": [*packages], **rest} if not rest and packages:
            return all(isinstance(package, str) and package.strip() for package in packages)
        case {"python": str(path), **rest} if not rest:
            return bool(path.strip())
    return False


@dataclass(frozen=True)
class RewardConfig(Block):
    scorers: dict[str, ScorerConfig] = main_key(
        {},
        "name -> scorer; the total is the weighted sum. '={mine: {path: F.py}}' replaces the experiment's, "
        "'+reward.scorers.mine={path: F.py}' adds one, '~reward.scorers.ocr' removes one",
    )
    on_error: Literal["drop_group", "stop"] = key(
        "drop_group", "when a scorer still fails after its retries: drop the sample's group, or stop the run"
    )
    trial: bool = key(
        True,
        "call every scorer once on grey images before a model is loaded; false: skip this, for scorers that cannot "
        "handle them",
    )
    retries: int = key(1, "times a failed scoring call is retried, in a new process if it died or hung", low=0)
    max_failed: float = key(
        0.5,
        "share of a step's or validation's images without a reward above which the run stops with a checkpoint",
        low=0,
        high=1,
    )

    def check(self) -> None:
        if "reward" in self.scorers:
            raise ConfigError("reward.scorers.reward: this name is reserved for the total, choose another")

    def check_weights(self) -> None:
        """Raise `ConfigError` if no scorer has a weight."""
        if not any(scorer.weight for scorer in self.scorers.values()):
            raise ConfigError(
                "reward.scorers has no scorer with a weight: add one, such as reward.scorers.ocr.weight=1"
            )

    @property
    def gpu_shares(self) -> list[float]:
        """The share of a GPU of every process of a scorer."""
        return [scorer.gpus for scorer in self.scorers.values() for _ in range(scorer.replicas)]


@dataclass(frozen=True)
class ValidationConfig(Block):
    data: Given | None = main_key(
        "signs_val", "held-out prompts, in the same formats as data.train, without weights; null: no validation"
    )
    every: int = main_key(10, "trainer steps between validations; 0: only at the start and the end", low=0)
    max_prompts: int | None = key(
        None, "maximum number of prompts, the first of each source in equal shares; null: all", low=1
    )
    images: int | None = key(
        32, "prompts whose images are kept and shown, spread evenly over the file; null: all", low=1
    )
    images_per_prompt: int = key(
        1, "images per held-out prompt; with more than one, their diversity is measured, which drops on collapse", low=1
    )
    height: int | None = key(None, "height of the images in pixels; null: as in sampling", low=8)
    width: int | None = key(None, "width of the images in pixels; null: as in sampling", low=8)
    keep: int | None = key(
        None, "latest validations whose images are kept, in addition to the first and the best; null: all", low=1
    )
    num_inference_steps: int | None = key(None, "denoising steps; null: as in sampling", low=1, high=10**4)
    guidance_scale: float | None = key(None, "guidance scale; null: as in sampling", low=0)
    micro_batch_size: int = key(32, "images denoised together", low=1)

    def check(self) -> None:
        if isinstance(self.data, bool) or (isinstance(self.data, str) and self.data.lower() in ("none", "false", "no")):
            raise ConfigError(f"validation.data={shown(self.data)}: set validation.data=null for no validation")
        if self.data is not None:
            sources(self.data, "validation.data", weighted=False)


@dataclass(frozen=True)
class CheckpointConfig(Block):
    every: int = main_key(10, "trainer steps between checkpoints; 0: only at the end", low=0)
    keep: int = key(2, "latest checkpoints kept, in addition to the one with the best validation reward", low=1)
    resume: str = main_key(
        "never",
        "'auto': resume the latest unfinished run of this experiment, or the one in hydra.run.dir; or the folder "
        "of a run or of a checkpoint; 'never': start a new run. A run resumes with its own config.yaml, keys given "
        "override it; experiment, algorithm, model, LoRA, prompts and seed cannot change",
    )


@dataclass(frozen=True)
class ClusterConfig(Block):
    launcher: Literal["ray", "local"] = key("ray", "workers as Ray actors, or in this process")
    num_workers: int | None = main_key(
        None,
        "rollout and actor workers; null: as many as the GPUs have ranks for; on a CPU two over Ray (with two "
        "cores, and one rank per worker), one in process",
        low=1,
    )
    layout: Literal["hybrid", "split"] = key(
        "hybrid",
        "every worker samples and trains, or some only sample and the others only train, which pays off when steps "
        "are sampled ahead; the numbers are the same",
    )
    rollout_workers: int | None = key(
        None, "workers that sample, with cluster.layout=split; null: those not in cluster.actor_workers", low=1
    )
    actor_workers: int | None = key(
        None,
        "workers that train, with cluster.layout=split; null: half of them, or those not in cluster.rollout_workers",
        low=1,
    )
    ranks_per_worker: int = key(
        1, "processes per worker, each on its own device with its part of a micro-batch; see model.shard", low=1
    )
    context: int = key(
        1,
        "ranks that compute each call of the denoiser together, each on part of its tokens: less memory and time "
        "per image for long videos and large images; must divide ranks_per_worker",
        low=1,
    )
    device: Literal["auto", "cpu", "cuda"] = key("auto", "device of the workers; auto is cuda if available")
    threads_per_worker: int | None = key(
        None, "CPU threads per worker; null: its share of the cores, at most OMP_NUM_THREADS if set", low=1
    )
    max_restarts: int = key(
        10,
        "dead workers that are replaced per hour, each time from the last finished step; one more ends the run; 0: "
        "the first one does",
        low=0,
    )
    patience: float = key(
        60.0, "seconds to wait for resources for a replacement worker; after that the run continues with fewer", low=1.0
    )
    hang_after: float = key(
        14400.0,
        "seconds without an answer from any worker, or progress of a download, after which they count as dead; "
        "must exceed an update, which is one call; loading has at least 600",
        low=1.0,
    )

    def check(self) -> None:
        names = ("rollout_workers", "actor_workers")
        given = {name: count for name in names if (count := getattr(self, name)) is not None}
        asked = " and ".join(f"cluster.{name}={count}" for name, count in given.items())
        if self.layout == "hybrid":
            if given:
                raise ConfigError(
                    f"{asked}: with cluster.layout=hybrid every worker samples and trains; set "
                    "cluster.num_workers, or cluster.layout=split"
                )
            return
        whole = f"cluster.num_workers={self.num_workers}"
        if self.num_workers == 1:
            raise ConfigError(f"{whole}: cluster.layout=split needs one worker that samples and one that trains; use 2")
        if self.num_workers is not None and len(given) == 1 and sum(given.values()) >= self.num_workers:
            raise ConfigError(f"{asked}: of {whole} none is left for the rest; lower it")
        if self.num_workers is not None and len(given) == 2 and sum(given.values()) != self.num_workers:
            raise ConfigError(f"{asked} do not add up to {whole}: remove one of the three")

    @property
    def workers(self) -> int | None:
        """How many there are to be, of all kinds; None: it is left open."""
        if self.num_workers is None and self.rollout_workers is not None and self.actor_workers is not None:
            return self.rollout_workers + self.actor_workers
        return self.num_workers

    def roles(self, workers: int) -> tuple[int, int]:
        """How many of all `workers` train, and how many draw: all of them, or they are divided.

        One of the two may be 0, if there are too few.
        """
        if self.layout == "hybrid":
            return workers, workers
        training = workers // 2 if self.rollout_workers is None else workers - self.rollout_workers
        training = max(0, training) if self.actor_workers is None else self.actor_workers
        return training, max(0, workers - training)


@dataclass(frozen=True)
class LoggerConfig(Block):
    trackers: list[TrackerName] = key(
        ["tensorboard"],
        "where metrics, images and settings are logged in addition to the run folder; [] for nowhere",
    )
    tensorboard: bool = key(True, "false removes tensorboard from logger.trackers")
    project: str | None = key(
        None, "the project, or experiment, of the trackers; default: the one in their own settings, else gerl"
    )
    tags: list[str] = key([], "tags of the run in the trackers, in addition to the algorithm's name")
    progress: bool = key(True, "show progress: a bar on a terminal, otherwise an occasional line")
    live: bool = key(True, "keep thumbnails of the current training step in live/, for gerl watch")
    report: bool = key(True, "write report.html at the end; `python -m gerl.run.report run=FOLDER` does so at any time")

    def check(self) -> None:
        if self.project is not None and not re.fullmatch(r"[0-9A-Za-z_.+-]{1,100}", self.project):
            raise ConfigError(
                f"logger.project={self.project!r}: use at most 100 ASCII letters, digits and _ - + ., which all "
                "trackers accept"
            )
        if wrong := [tag for tag in self.tags if not 1 <= len(tag) <= 64]:
            raise ConfigError(f"logger.tags: {wrong[0]!r:.80} has {len(wrong[0])} characters; use 1 to 64 per tag")

    @property
    def used_trackers(self) -> list[TrackerName]:
        """Those of `trackers`, each once, without TensorBoard where that is switched off."""
        return [name for name in dict.fromkeys(self.trackers) if name != "tensorboard" or self.tensorboard]


@dataclass(frozen=True)
class TrainerConfig(Block):
    steps: int = main_key(100, "trainer steps (rollout, score, update)", low=1)
    staleness: int = key(
        0,
        "steps sampled ahead: those after the one in training, with the weights available at that time, so that "
        "slow scorers do not block; the same command still gives the same numbers",
        low=0,
        high=16,
    )
    seed: int = main_key(0, "seed of all random numbers: LoRA, prompt order, noise, windows", low=0)
