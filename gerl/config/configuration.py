"""The whole configuration: its blocks, checks across blocks, and a one-line description of a run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Literal, get_args

from pydantic import ConfigDict

from gerl.config import blocks
from gerl.config.algorithms import AlgorithmConfig, AnyAlgorithm, algorithm_config
from gerl.config.call_arguments import check_levels
from gerl.config.episodes import EpisodeConfig
from gerl.config.exclusions import EXCLUSIONS, check_exclusions
from gerl.config.held_out import chosen
from gerl.config.schema import shown
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
        has_base = (
            self.model.train == "lora" or not self.algorithm.moves_reference
        )  # else the base weights are not kept
        return (
            self.guard.judge == "base" and self.guard.action != "off" and self.validation.data is not None and has_base
        )

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
        sources = [] if self.data.train is None else blocks.sources(self.data.train, "data.train")
        sources += [] if held_out in (None, blocks.HELD_OUT) else blocks.sources(held_out, "validation.data")
        if self.data.stream is not None and not any(source.on_hub for source in sources):
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
    usual = "the pipeline's own"
    sides = [usual if side is None else str(side) for side in (sampling.height, sampling.width)]
    size = f"{usual} size" if sampling.height is sampling.width is None else " x ".join(sides) + " (height x width)"
    guidance = f"{usual} guidance" if sampling.guidance_scale is None else f"guidance {sampling.guidance_scale:g}"
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


def check_teachers(config: Config) -> None:
    """Raise `ConfigError` if a teacher is a LoRA but no LoRA is trained."""
    if config.model.train != "lora" and (taught := [t for t in config.algorithm.needs.teachers if t.lora is not None]):
        raise ConfigError(
            f"algorithm.teachers: lora={taught[0].lora} would be a LoRA next to the trained one, and with "
            f"model.train={config.model.train} there is none; use model.train=lora, or merge it into its own "
            "pipeline and give that as path"
        )


def check_critic(config: Config) -> None:
    """Raise `ConfigError` if a key of the critic is set and none is trained."""
    critic, default = config.critic, blocks.CriticConfig()
    changed = [f.name for f in fields(critic) if getattr(critic, f.name) != getattr(default, f.name)]
    if changed and not config.algorithm.needs.values:
        estimator = getattr(config.algorithm, "adv_estimator", None)
        why = f"algorithm.adv_estimator={estimator}" if estimator else f"algorithm={config.algorithm.name}"
        raise ConfigError(
            f"critic.{changed[0]}={shown(getattr(critic, changed[0]))}: no critic is trained with {why}; use "
            "algorithm=flow_ppo, or remove it"
        )


def check_held_out(config: Config) -> None:
    """Raise `ConfigError` if a key names a held-out metric and there are no held-out prompts."""
    if config.validation.data is None and (keys := chosen(config.checkpoint.best, config.trainer.stop_at)):
        raise ConfigError(f"{next(iter(keys))}: there are no held-out prompts, validation.data=null; set them")


# --- Keys against reward hacking, and their requirements: a KL, watched scorers, held-out prompts


def check_remedies(config: Config) -> None:
    """Raise `ConfigError` if a requirement of a key against reward hacking is missing."""
    algorithm, scorers = config.algorithm, config.reward.scorers
    if algorithm.kl_share < 1:
        reference_scorers(algorithm, scorers)
    held_out = [name for name, scorer in scorers.items() if scorer.during == "validation"]
    if held_out and config.validation.data is None:
        raise ConfigError(
            f"reward.scorers.{held_out[0]}.during=validation: there are no held-out prompts; set validation.data, "
            f"or remove the scorer with ~reward.scorers.{held_out[0]}"
        )
    if (shaping := getattr(algorithm, "diversity", "none")) != "none":
        name = getattr(algorithm, "diversity_scorer", "")
        key = f"reward.scorers.{name.split('/')[0]}"
        if name.split("/")[0] in held_out:
            raise ConfigError(f"algorithm.diversity={shaping}: {name} runs during validation only; remove {key}.during")
        if name.split("/")[0] not in scorers:
            raise ConfigError(
                f"algorithm.diversity={shaping}: there is no scorer {name!r} to measure dissimilarity; add one, such "
                f"as +{key}.weight=0, or name it in algorithm.diversity_scorer"
            )


def reference_scorers(algorithm: AlgorithmConfig, scorers: Mapping[str, blocks.ScorerConfig]) -> Sequence[str]:
    """Return the scorers for `algorithm.kl_share`. Raises `ConfigError` if there are none, or one is not watched."""
    watched = [name for name, scorer in scorers.items() if scorer.weight == 0 and scorer.during != "validation"]
    for name in algorithm.kl_doubters:
        if name in scorers and scorers[name].during == "validation":
            raise ConfigError(
                f"algorithm.kl_doubters: {name} must score training images, and "
                f"reward.scorers.{name}.during=validation; remove that"
            )
        if name not in watched:
            there = ", ".join(watched) or "none"
            raise ConfigError(
                f"algorithm.kl_doubters: {name!r} is not a scorer with weight 0, of which there are {there}; name "
                f"those, or add it with +reward.scorers.{name}.weight=0"
            )
    if not watched:
        raise ConfigError(
            f"algorithm.kl_share={algorithm.kl_share}: the images are selected by the scores of watched scorers in "
            "training, and none has weight 0; add one, such as +reward.scorers.aesthetic.weight=0, or use "
            "algorithm.kl_share=1"
        )
    return algorithm.kl_doubters or watched


# --- Keys that save time: their effect on results, and when they cannot be used.
#
# exact: bitwise equal results. rounding: equal up to the summation order. images: images are sampled by a cheaper
# approximation, while trained steps are computed exactly. policy: other weights sample than those trained, corrected by
# the recorded log-probabilities of the sampling weights. gradient: a deliberately different gradient.

Effect = Literal["exact", "rounding", "images", "policy", "gradient"]


@dataclass(frozen=True)
class Saving:
    """A key that saves time, with an example value, its effect, and the reason if a configuration cannot use it."""

    key: str
    example: str
    effect: Effect
    saves: str
    refusal: Callable[[Config], str | None] = lambda _: None

    def value(self, config: Config) -> object:
        """Return the key's value in `config`; None if the algorithm has no such key."""
        block, name = self.key.split(".")
        return getattr(getattr(config, block), name, None)


def _of_cache(config: Config) -> str | None:
    if config.sampling.cache == "none":
        return None
    if config.algorithm.needs.trajectory and config.sampling.kernel == "ode":
        return f"{config.algorithm.name} trains at steps without noise, which must be exact"
    if (backend := config.model.compile) is not None:
        return f"it is switched on and off between steps, which would recompile with model.compile={backend}"
    if config.lockstep:
        return "ranks that work in lockstep must run the same blocks"
    return None


def _of_step_batch(config: Config) -> str | None:
    if config.actor.step_batch > 1 and config.algorithm.cfg == "detach_uncond":
        return "algorithm.cfg=detach_uncond runs the halves of each step separately; use cfg=joint"
    if config.actor.step_batch > 1 and config.algorithm.needs.reward_gradient and not config.algorithm.needs.ratio:
        return f"{config.algorithm.name} backpropagates from one step to the one before"
    return None


def _quantized_rollout(config: Config) -> str | None:
    if config.rollout.quantize == "none":
        return None
    algorithm, model = config.algorithm, config.model
    if algorithm.needs.trajectory and not (algorithm.needs.ratio and algorithm.cfg != "off"):
        why = "with algorithm.cfg=off it" if algorithm.needs.ratio else algorithm.name
        return f"{why} has no ratio to the sampling policy, which would correct for different weights"
    if model.train != "lora":
        return f"with model.train={model.train} the copies would have to be updated with the weights"
    if model.quantize != "none" or model.offload == "blocks":
        return "it makes copies of weights on the device; use model.quantize=none and model.offload=none or encoders"
    if config.lockstep:
        return "it does not support sharded weights or tokens yet"
    return None


SAVINGS = (
    Saving("data.cache_gb", "2", "rounding", "text encoding: each prompt once"),
    Saving("data.cache", "FOLDER", "exact", "text encoding and loading of the encoders, across runs"),
    Saving("sampling.same_init_noise", "true", "rounding", "denoising steps that the images of a group share"),
    Saving("actor.step_batch", "3", "rounding", "denoiser calls in the update", _of_step_batch),
    Saving("model.compile", "inductor", "rounding", "time per call: compiled blocks"),
    Saving("model.attention", "native", "rounding", "time per call: another kernel"),
    Saving("model.channels_last", "true", "rounding", "VAE time"),
    Saving("sampling.solver", "dpm2", "images", "steps: better images for the same number"),
    Saving("sampling.compression", "0.5", "images", "steps after the noisy ones"),
    Saving("sampling.cache", "first_block", "images", "denoiser blocks at steps without noise", _of_cache),
    Saving("rollout.quantize", "int8", "policy", "time per call in the rollout: 8-bit products", _quantized_rollout),
    Saving("algorithm.cfg", "detach_uncond", "gradient", "backward pass of the unconditional half of guidance"),
    Saving("algorithm.train_share", "0.5", "gradient", "the update of images with small advantages"),
)


def check_savings(config: Config) -> None:
    """Raise `ConfigError` if a key that saves time cannot be used with the rest of the configuration."""
    for saving in SAVINGS:
        if reason := saving.refusal(config):
            value = shown(saving.value(config)).strip("'")
            raise ConfigError(f"{saving.key}={value}: {reason}; remove it")


def saving_notes(config: Config) -> list[str]:
    """Return notes for the log if a key that saves time changes the images or the sampling policy."""
    sampling, notes = config.sampling, []
    if sampling.cache != "none":
        exact = "noisy steps are computed in full" if sampling.kernel != "ode" else "training computes in full"
        together = "; the images of a batch together decide what is skipped" * (sampling.cache == "first_block")
        key = f"sampling.cache={sampling.cache}"
        notes.append(f"{key}: images are sampled with approximate denoising steps, {exact}{together}")
        if config.algorithm.needs.trajectory and sampling.window_size is None and not config.algorithm.needs.tree:
            notes.append(
                f"{key} has little effect: all denoising steps but the last are noisy; set a sampling.window_size"
            )
    if config.rollout.quantize != "none":
        corrected = "their ratio corrects for it" if config.algorithm.needs.ratio else "training learns from images"
        notes.append(f"rollout.quantize={config.rollout.quantize}: images are sampled with 8-bit weights, {corrected}")
    return notes
