"""The whole configuration: its blocks, checks across blocks, and a one-line description of a run."""

from dataclasses import dataclass, field, fields
from typing import get_args

from pydantic import ConfigDict

from gerl.config import blocks
from gerl.config.algorithms import AnyAlgorithm, algorithm_config
from gerl.config.call_arguments import check_levels
from gerl.config.episodes import EpisodeConfig
from gerl.config.exclusions import EXCLUSIONS, check_exclusions
from gerl.config.rules import check_critic, check_held_out, check_remedies, check_savings, check_teachers
from gerl.errors import ConfigError

MOST_IMAGES = 10**6  # per trainer step, which is planned, sampled and stored as a whole


@dataclass(frozen=True)
class Config:
    """The whole configuration."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    model: blocks.ModelConfig = field(default_factory=blocks.ModelConfig)
    sampling: blocks.SamplingConfig = field(default_factory=blocks.SamplingConfig)
    rollout: blocks.RolloutConfig = field(default_factory=blocks.RolloutConfig)
    algorithm: AnyAlgorithm = field(default_factory=algorithm_config)
    actor: blocks.ActorConfig = field(default_factory=blocks.ActorConfig)
    critic: blocks.CriticConfig = field(default_factory=blocks.CriticConfig)
    reward: blocks.RewardConfig = field(default_factory=blocks.RewardConfig)
    data: blocks.DataConfig = field(default_factory=blocks.DataConfig)
    validation: blocks.ValidationConfig = field(default_factory=blocks.ValidationConfig)
    guard: blocks.GuardConfig = field(default_factory=blocks.GuardConfig)
    checkpoint: blocks.CheckpointConfig = field(default_factory=blocks.CheckpointConfig)
    cluster: blocks.ClusterConfig = field(default_factory=blocks.ClusterConfig)
    logger: blocks.LoggerConfig = field(default_factory=blocks.LoggerConfig)
    trainer: blocks.TrainerConfig = field(default_factory=blocks.TrainerConfig)
    episode: EpisodeConfig = field(default_factory=EpisodeConfig)

    def __post_init__(self) -> None:
        self.algorithm.check_sampling(self.sampling)
        parts = {f.name: getattr(self, f.name) for f in fields(self)}
        parts |= {"needs": self.algorithm.needs, "lockstep": self.lockstep, "has_kl": self.has_kl}
        parts |= {"base_alignment": any(self.reward.by_latents(part) for part in get_args(blocks.RunPart))}
        check_exclusions((*EXCLUSIONS, *self.algorithm.excludes), parts)
        if self.data.train_on == "rollouts":
            self.reward.check_weights()
        if self.validation.data is not None:
            steps = self.validation.num_inference_steps
            check_levels(self.sampling.call, steps, "validation.num_inference_steps")
        self._check_batches()
        self._check_sources()
        self._check_processes()
        check_critic(self)
        check_teachers(self)
        check_savings(self)
        check_remedies(self)
        check_held_out(self)

    @property
    def has_kl(self) -> bool:
        """Whether the KL to the base model has a weight, or may get one during the run."""
        return self.algorithm.kl_coef > 0 or self.guard.raises_kl

    @property
    def judges(self) -> bool:
        """Whether the base model judges held-out images (`guard.judge`)."""
        known = self.model.train == "lora" or not self.algorithm.moves_reference  # else the base weights are not kept
        return self.guard.judge == "base" and self.guard.action != "off" and self.validation.data is not None and known

    @property
    def needs_base(self) -> bool:
        """Whether workers compute something with the weights before training, besides the algorithm."""
        return self.judges or any(self.reward.by_latents(part) for part in get_args(blocks.RunPart))

    @property
    def lockstep(self) -> bool:
        """Whether ranks gather weights or tokens from each other, and therefore must call the model equally often."""
        return self.lockstep_ranks > 1

    @property
    def lockstep_ranks(self) -> int:
        """Number of ranks in lockstep: all of a worker, or only those that share the tokens of a call."""
        return self.cluster.context if self.model.shard == "none" else self.cluster.ranks_per_worker

    def _check_processes(self) -> None:
        cluster, named = self.cluster, [name for name, scorer in self.reward.scorers.items() if scorer.env]
        if named and cluster.launcher == "local":
            raise ConfigError(
                f"reward.scorers.{named[0]}.env: a scorer needs its own process for its own environment, and "
                "cluster.launcher=local has only one; use cluster.launcher=ray, or remove env"
            )
        if cluster.ranks_per_worker % cluster.context:
            raise ConfigError(
                f"cluster.context={cluster.context}: it must divide "
                f"cluster.ranks_per_worker={cluster.ranks_per_worker}; use a number that does, or 1"
            )

    def _check_sources(self) -> None:
        if self.data.regularise is not None:
            blocks.sources(self.data.regularise, "data.regularise", weighted=False)
        held_out = self.validation.data
        given = [] if self.data.train is None else blocks.sources(self.data.train, "data.train")
        given += [] if held_out in (None, blocks.HELD_OUT) else blocks.sources(held_out, "validation.data")
        if self.data.stream is not None and not any(source.on_hub for source in given):
            raise ConfigError(
                f"data.stream={self.data.stream}: it is for data sets of the Hub, and neither data.train nor "
                "validation.data begins with hf:; remove it"
            )

    def _check_batches(self) -> None:
        rollout, actor, algorithm = self.rollout, self.actor, self.algorithm
        if (images := rollout.prompts_per_step * rollout.n) > MOST_IMAGES:
            raise ConfigError(
                f"rollout.prompts_per_step={rollout.prompts_per_step} times rollout.n={rollout.n} is {images} "
                f"images per trainer step, at most {MOST_IMAGES} are supported: lower one"
            )
        micro = actor.micro_batch_size
        if micro is not None and micro > rollout.micro_batch_size:
            raise ConfigError(
                f"actor.micro_batch_size={micro}: it must be at most rollout.micro_batch_size="
                f"{rollout.micro_batch_size}, whose recorded batches are replayed"
            )
        together = algorithm.needs.sampled_images(rollout.n)
        if rollout.n % together:
            raise ConfigError(f"rollout.n={rollout.n}: {algorithm.name} compares images in pairs, use an even number")
        if rollout.micro_batch_size < together:
            what = "pair" if together == 2 else "group"
            raise ConfigError(
                f"rollout.micro_batch_size={rollout.micro_batch_size}: {algorithm.name} needs the {together} images "
                f"of a {what} in one micro-batch; raise it"
            )


# --- One-line description of a run


def described(config: Config, preset: str = "") -> str:
    """Describe a run in one line, as in the log; `preset`: the name by which the algorithm was selected."""
    sampling, model = config.sampling, config.model
    own = "the pipeline's own"
    sides = [own if side is None else str(side) for side in (sampling.height, sampling.width)]
    size = f"{own} size" if sampling.height is sampling.width is None else " x ".join(sides) + " (height x width)"
    guidance = f"{own} guidance" if sampling.guidance_scale is None else f"guidance {sampling.guidance_scale:g}"
    layers = model.lora_targets or "attention and feed-forward layers"
    trained = f"LoRA rank {model.lora_rank} on {layers}" if model.train == "lora" else f"model.train={model.train}"
    scorers = config.reward.scorers.items()
    reward = " + ".join(name if s.weight == 1 else f"{s.weight:g} {name}" for name, s in scorers if s.weight)
    if config.data.train_on == "files":
        reward = "none, the images of data.train"
    images = f"{config.rollout.prompts_per_step} prompts of {config.rollout.n} images per step"
    return (
        f"{preset or config.algorithm.name} on {model.path}: {size}, {sampling.num_inference_steps} steps, "
        f"{guidance}, {trained}, {images}, {config.trainer.steps} trainer steps, reward {reward or 'none'}"
    )
