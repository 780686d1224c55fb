"""The block `algorithm`: a class for each algorithm with the keys that it reads, their defaults, and its facts."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal, cast, get_args

from pydantic import Field

from gerl.config.blocks import (
    AdvantageEstimator,
    CfgMode,
    DiversityShaping,
    KLKind,
    LevelDraw,
    LikelihoodWeighting,
    NodeStdKind,
    SamplingConfig,
    StdKind,
    StepDistance,
    StepLikelihood,
    StepWeighting,
)
from gerl.config.schema import Block, key, main_key, shown
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


# --- The keys and facts that algorithms of several kinds share


def name_key(default: str) -> Any:
    help = "the algorithm; `algorithm=NAME` on the command line selects it with its published settings"
    return main_key(default, help)


def cfg_key(default: CfgMode) -> Any:
    halves = "gradient through both halves; only the conditional one; or off (CFG distillation)"
    return main_key(default, f"guidance in the update: {halves}")


@dataclass(frozen=True)
class AlgorithmConfig(Block):
    """The keys that every algorithm reads, and the facts that others ask for."""

    whole_groups: ClassVar[bool] = False  # the loss of an image depends on the others of its group
    scores_steps: ClassVar[bool] = False  # it scores the rollout's noise: on policy the ratio to what was recorded is 1
    replays_latents: ClassVar[bool] = False  # it trains at the latents of the trajectory, not at images noised again
    needs_files: ClassVar[bool] = False  # it learns from images of files only
    differentiates: ClassVar[bool] = False  # it needs the gradient of the reward, not only its value
    branches: ClassVar[bool] = False  # trajectories split: the tree says which steps are stochastic
    imitates: ClassVar[bool] = False  # a second LoRA is trained, which imitates the images that are drawn

    name: str
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

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The values of `algorithm.name` that mean this class."""
        return get_args(cls.__annotations__["name"])

    @property
    def groups_of_one(self) -> bool:
        """Whether a prompt may have a single image."""
        return False

    @property
    def taught_by(self) -> list[Teacher]:
        """The models whose denoising steps it learns; none where it learns from rewards alone."""
        return []

    def sampled_together(self, n: int) -> int:
        """How many of the `n` images of a group a micro-batch of the rollout must hold."""
        return 1

    def compared(self, n: int) -> int:
        """How many of the `n` images of a group the loss of one depends on."""
        return n if self.whole_groups else 1

    @property
    def clip_range(self) -> tuple[float, float] | None:
        """How far below and above 1 the ratio may go; None where it is not bounded."""
        return None

    def clip_range_at(self, dimensions: int) -> tuple[float, float] | None:
        """`clip_range` for latents of so many dimensions."""
        del dimensions
        return self.clip_range

    @property
    def subtracts_kl(self) -> bool:
        """Whether the KL to the base model is subtracted from the rewards rather than added to the loss."""
        return False

    @property
    def moves_reference(self) -> bool:
        """Whether other weights take the base model's place in the KL while the run goes on."""
        return self.kl_reset_every > 0 or self.kl_reset_above is not None

    def check_sampling(self, sampling: SamplingConfig) -> None:
        """Raise `ConfigError` if it cannot learn from what `sampling` draws."""


@dataclass(frozen=True)
class NormalisedConfig(AlgorithmConfig):
    """Credit is the reward relative to a baseline."""

    adv_estimator: AdvantageEstimator = key(
        "grpo",
        "baseline: mean of the group; of its other members; of the batch; or each scorer normalised before the sum",
    )
    advantage_std: StdKind = key(
        "group", "divisor of the centred rewards: the group's std, the batch's, or none (Dr. GRPO)"
    )

    @property
    def groups_of_one(self) -> bool:
        return self.adv_estimator == "reinforce_pp"


@dataclass(frozen=True)
class ShapedConfig(NormalisedConfig):
    """The images of a group may count by how unlike the others they are, too."""

    diversity: DiversityShaping = key(
        "none",
        "how an image's dissimilarity to the rest of its group (a watched groupwise scorer) shapes its advantage: "
        "scale multiplies positive advantages by it, relative to the group's mean (GARDO); add adds diversity_coef "
        "times the advantage that it would have as a reward (as DRIFT, which shapes the reward by the diversity of "
        "the group)",
    )
    diversity_scorer: str = key("diversity", "the scorer, or its column NAME/PART, that measures the dissimilarity")
    diversity_coef: float = key(0.1, "see diversity=add", above=0)


@dataclass(frozen=True)
class DownSampledConfig(ShapedConfig):
    """An image is trained on by itself, so those that teach little may be left out."""

    train_share: float = key(
        1.0, "share of a group's images used for training, those with the largest |advantage| (PODS)", above=0, high=1
    )


@dataclass(frozen=True)
class ClippedConfig(AlgorithmConfig):
    """The ratio to the policy that drew has bounds."""

    clip_low: float = main_key(1e-4, "lower bound of the ratio is 1 - this value", above=0, high=1)
    clip_high: float = main_key(1e-4, "upper bound of the ratio is 1 + this value", above=0)

    @property
    def clip_range(self) -> tuple[float, float]:
        return self.clip_low, self.clip_high


# --- The keys of the algorithms that train at the latents of a trajectory: policy gradients, pairs, neighbours


@dataclass(frozen=True)
class TrajectoryClipConfig(ClippedConfig):
    """The ratio is that of log-probabilities that are means over the D dimensions of the latents.

    Their difference is a mean of D independent terms and spreads as 1 / sqrt(D): what is a narrow range for one size is
    a wide one for another.
    """

    clip_dimensions: int | None = key(
        65536,
        "latent dimensions for which clip_low and clip_high are meant (SD3 at 512 x 512: 65536): with D dimensions "
        "they are scaled by sqrt(this / D); null: unscaled",
        low=1,
    )

    def clip_range_at(self, dimensions: int) -> tuple[float, float]:
        scale = 1.0 if self.clip_dimensions is None else math.sqrt(self.clip_dimensions / dimensions)
        return scale * self.clip_low, scale * self.clip_high


@dataclass(frozen=True)
class PolicyGradientConfig(AlgorithmConfig):
    """The noise of a trajectory's stochastic steps is scored."""

    scores_steps = True
    replays_latents = True

    kl_type: KLKind = key("gaussian", "the true KL of a step; |dt| times it; squared velocity; or sampled estimators")

    @property
    def step_weighting(self) -> StepWeighting:
        """The factors of the steps' losses."""
        return "uniform"

    @property
    def step_likelihood(self) -> StepLikelihood:
        """The log-likelihood that the ratio is of."""
        return "gaussian"

    def check(self) -> None:
        super().check()
        if self.kl_type == "k1" and not self.subtracts_kl:
            raise ConfigError(
                "algorithm.kl_type=k1: on policy its gradient is 0 on average, so in the loss it has no effect; "
                f"use gaussian or k2{'' if self.branches else ', or algorithm.kl_in_reward=true'}"
            )

    def check_sampling(self, sampling: SamplingConfig) -> None:
        if sampling.noise_level == 0 or sampling.kernel == "ode":
            name = "kernel=ode" if sampling.kernel == "ode" else "noise_level=0"
            raise ConfigError(
                f"sampling.{name}: {self.name} is a policy gradient and needs stochastic steps: "
                "a deterministic one has no log-probability; use kernel=flow_sde with noise_level=0.7, or "
                "algorithm=diffusion_nft"
            )


@dataclass(frozen=True)
class WeightedConfig(PolicyGradientConfig):
    """Steps may count differently."""

    timestep_weights: StepWeighting = key(
        "uniform",
        "factor of each step's loss, whose gradient is J / std times the noise: 1, std, 1/|dt|, 1/|J|, std |dt| / "
        "|J| (PCPO), or std^2 / |J|; python -m gerl.preflight signal=4 measures which carries the reward",
    )

    @property
    def step_weighting(self) -> StepWeighting:
        return self.timestep_weights


@dataclass(frozen=True)
class ChainConfig(WeightedConfig, DownSampledConfig):
    """Every image has a trajectory of its own."""

    kl_in_reward: bool = key(False, "subtract the KL from the reward rather than add it to the loss")
    timestep_fraction: float = key(
        1.0, "share of the stochastic steps that are trained, selected at random each step", above=0, high=1
    )
    history: int = key(0, "rewards kept per prompt whose mean and std normalise; 0: those of the group", low=0)

    @property
    def groups_of_one(self) -> bool:
        return self.history > 0 or super().groups_of_one

    @property
    def subtracts_kl(self) -> bool:
        return self.kl_in_reward

    def check(self) -> None:
        super().check()
        if self.kl_in_reward and self.kl_type == "velocity":
            raise ConfigError(
                "algorithm.kl_in_reward=true: it uses values recorded in the rollout, which "
                f"kl_type={self.kl_type} cannot; use kl_type=gaussian, or put the KL in the loss"
            )


@dataclass(frozen=True)
class TreeConfig(PolicyGradientConfig, TrajectoryClipConfig):
    """Images share the beginning of a trajectory."""

    branches = True

    branch_factor: int = main_key(2, "children of a node of a tree", low=2)

    @property
    def groups_of_one(self) -> bool:
        return True

    def check_sampling(self, sampling: SamplingConfig) -> None:
        super().check_sampling(sampling)
        if sampling.window_size is not None or sampling.compression < 1 or sampling.same_init_noise:
            raise ConfigError(
                f"sampling.window_size, compression and same_init_noise have no effect for {self.name}, whose tree "
                "defines which steps are stochastic; leave them at their defaults"
            )


@dataclass(frozen=True)
class FlowGRPOConfig(ChainConfig, TrajectoryClipConfig):
    name: Literal["flow_grpo", "flow_grpo_fast", "dance_grpo", "mix_grpo", "ddpo"] = name_key("flow_grpo")
    likelihood: StepLikelihood = key(
        "gaussian",
        "log-likelihood of a step in the ratio: the Gaussian's, or -(x' - mean)^2, 2 std^2 times as steep (published "
        "with cps)",
    )
    decoupled: bool = key(
        False,
        "with trainer.staleness or rollout.quantize: clip the ratio to the weights at the start of the step rather "
        "than to the sampling weights, and weight it by the ratio of the two (AReaL)",
    )

    @property
    def step_likelihood(self) -> StepLikelihood:
        return self.likelihood


@dataclass(frozen=True)
class GRPOGuardConfig(ChainConfig, TrajectoryClipConfig):
    name: Literal["grpo_guard"] = name_key("grpo_guard")


@dataclass(frozen=True)
class FlowDPPOConfig(ChainConfig):
    name: Literal["flow_dppo"] = name_key("flow_dppo")
    kl_threshold: float = main_key(1e-5, "KL to the rollout's policy above which a step stops", above=0)


@dataclass(frozen=True)
class TempFlowGRPOConfig(WeightedConfig, TreeConfig, NormalisedConfig):
    name: Literal["tempflow_grpo"] = name_key("tempflow_grpo")


@dataclass(frozen=True)
class DenseGRPOConfig(WeightedConfig, TrajectoryClipConfig, NormalisedConfig):
    branches = True

    name: Literal["dense_grpo"] = name_key("dense_grpo")

    def check_sampling(self, sampling: SamplingConfig) -> None:
        super().check_sampling(sampling)
        if sampling.compression < 1:
            raise ConfigError(
                f"sampling.compression={sampling.compression}: {self.name} turns the latents of every step into an "
                "image, which must be comparable; use 1"
            )


@dataclass(frozen=True)
class BranchGRPOConfig(TreeConfig):
    name: Literal["branch_grpo", "tree_grpo"] = name_key("branch_grpo")
    split_steps: list[int] | None = key(
        [0, 2, 4], "steps at which a trajectory splits; null: those of the window, the only ones with noise (TreeGRPO)"
    )
    node_std: NodeStdKind = key(
        "depth", "divisor of a node's advantage: the std of the nodes at its depth, or of the leaves (TreeGRPO)"
    )
    split_noise: float = key(
        1.0,
        "factor of sampling.noise_level at the steps at which a trajectory splits, so that its children differ",
        above=0,
    )

    def check(self) -> None:
        super().check()
        splits = self.split_steps
        if splits is not None and (not splits or sorted(set(splits)) != list(splits)):
            raise ConfigError(f"algorithm.split_steps={list(splits)}: expected increasing step indices")

    def check_sampling(self, sampling: SamplingConfig) -> None:
        if self.split_steps is None:
            if sampling.window_size is None or sampling.window_per == "group":
                raise ConfigError(
                    "algorithm.split_steps=null: trees split at the steps of a window; set a sampling.window_size "
                    "and window_per=step"
                )
            sampling = replace(sampling, window_size=None, window_schedule="random")  # here they have a meaning
        super().check_sampling(sampling)
        last = sampling.steps_range[1] - 1
        if self.split_steps is not None and self.split_steps[-1] > last:
            raise ConfigError(
                f"algorithm.split_steps={list(self.split_steps)}: the last stochastic step is {last}, split before it"
            )
        if self.split_noise > 1 and sampling.kernel in ("cps", "ddim") and self.split_noise * sampling.noise_level > 1:
            raise ConfigError(
                f"algorithm.split_noise={self.split_noise}: times sampling.noise_level={sampling.noise_level} it "
                f"exceeds 1, the maximum of {sampling.kernel}; lower one"
            )


@dataclass(frozen=True)
class FDFOConfig(AlgorithmConfig):
    replays_latents = True

    name: Literal["fdfo"] = name_key("fdfo")
    ratio_width: float = main_key(
        0.03, "maximum distance from 1 to which the loss moves the ratio of a step (SPO)", above=0
    )

    def sampled_together(self, n: int) -> int:
        return 2

    def check_sampling(self, sampling: SamplingConfig) -> None:
        if sampling.noise_level == 0 or sampling.kernel == "ode":
            name = "kernel=ode" if sampling.kernel == "ode" else "noise_level=0"
            raise ConfigError(
                f"sampling.{name}: the two images of a pair start from the same noise and are identical unless the "
                "steps have noise; use kernel=cps with noise_level=0.045"
            )


@dataclass(frozen=True)
class NeighborGRPOConfig(NormalisedConfig, ClippedConfig):
    replays_latents = True

    name: Literal["neighbor_grpo"] = name_key("neighbor_grpo")
    timesteps: int | None = main_key(None, "noise levels trained per trainer step; null: all in the range", low=1)
    anchors: int = key(4, "images of a group that are trained, selected at random each step", low=1)
    temperature: float = key(1.0, "mean squared distance of latents at which a neighbour has weight 1/e", above=0)
    quasi_norm: float = key(
        0.8, "p of the norm that divides advantages: below 2, groups without clear winners count less", above=0, high=2
    )

    def sampled_together(self, n: int) -> int:
        return n  # the update knows the neighbours from the rollout

    def check_sampling(self, sampling: SamplingConfig) -> None:
        if sampling.kernel != "ode" or sampling.solver != "euler":
            given = f"kernel={sampling.kernel}" if sampling.kernel != "ode" else f"solver={sampling.solver}"
            raise ConfigError(
                f"sampling.{given}: {self.name} compares Euler steps without noise, use kernel=ode with solver=euler"
            )
        if not sampling.same_init_noise or sampling.init_noise_spread == 0:
            raise ConfigError(
                f"sampling.init_noise_spread={sampling.init_noise_spread}: {self.name} compares images with "
                "similar initial noise; use same_init_noise=true with init_noise_spread=0.3"
            )


# --- The keys of the algorithms that noise finished images again and compare outputs at some noise levels


@dataclass(frozen=True)
class ForwardProcessConfig(AlgorithmConfig):
    """Finished images are noised again, and the loss compares outputs at some noise levels."""

    cfg: CfgMode = cfg_key("off")
    timesteps: int | None = main_key(None, "noise levels trained per trainer step; null: all in the range", low=1)
    timesteps_drawn: LevelDraw = key(
        "spread",
        "which levels of the range: one from each of as many equal parts; any, the same for all images of a step; "
        "or any for each image (each group, if it shares its noise), for which the denoiser runs at all of them",
    )
    reference_guidance: float | None = key(
        None,
        "guidance scale of the base model as reference of the KL and of preferences, which may differ from the "
        "rollout's; null: that of the update",
        low=0,
    )
    old_decay: list[float] = key(
        [0.0, 0.0, 0.0, 0.0],
        "decay of the old policy, averaged once per trainer step: [hold, start, slope, limit] is start for `hold` "
        "steps, then rises by slope per step up to limit",
    )
    old_every: int = key(1, "trainer steps between updates of the old policy", low=1)
    rollout_decay: list[float] | None = key(
        None, "the same for the weights that sample rollouts; null: the trained weights"
    )
    old_kl_coef: float = key(0.0, "weight of the squared distance to the old policy", low=0)
    norm_coef: float = key(
        0.0, "weight of the squared excess of the output's norm over that of the base model (NormGuard)", low=0
    )

    def check(self) -> None:
        super().check()
        for name, value in (("old_decay", self.old_decay), ("rollout_decay", self.rollout_decay)):
            if value is not None and (len(value) != 4 or not (0 <= value[1] <= 1 and 0 <= value[3] <= 1)):
                raise ConfigError(
                    f"algorithm.{name}={list(value)}: expected [hold, start, slope, limit], decays in [0, 1]"
                )


@dataclass(frozen=True)
class ContrastConfig(ForwardProcessConfig, ShapedConfig):
    """The policy is compared with the old one by what it implies."""

    mix: float = key(1.0, "b: distance of the implicit policies from the old one", above=0)


@dataclass(frozen=True)
class PreferenceConfig(ForwardProcessConfig):
    """The images of a group are preferred to each other, at noise that they share."""

    whole_groups = True

    beta: float = key(100.0, "sharpness of preferences", above=0)


@dataclass(frozen=True)
class DiffusionNFTConfig(ContrastConfig):
    name: Literal["diffusion_nft"] = name_key("diffusion_nft")


@dataclass(frozen=True)
class AWMConfig(ForwardProcessConfig, DownSampledConfig, ClippedConfig):
    name: Literal["awm"] = name_key("awm")
    weighting: LikelihoodWeighting = key("uniform", "likelihood weight of a noise level")
    off_policy: bool = key(
        True, "the ratio is relative to the old policy; false: to the trained weights, hence 1 and never clipped"
    )
    shared_noise: bool = key(
        False,
        "the images of a group get the same noise at each level: their common part then cancels in the gradient, "
        "since their advantages sum to 0",
    )


@dataclass(frozen=True)
class DGPOConfig(PreferenceConfig, ShapedConfig, ClippedConfig):
    name: Literal["dgpo"] = name_key("dgpo")
    reference: Literal["base", "old"] = key("base", "reference of the preferences: base model or old policy")
    rollout_old_after: int | None = key(
        None,
        "trainer steps after which the old policy samples the rollouts; null: the trained weights always do",
        low=0,
    )

    def check(self) -> None:
        super().check()
        if self.rollout_old_after is not None and self.rollout_decay is not None:
            raise ConfigError(
                f"algorithm.rollout_old_after={self.rollout_old_after}: with algorithm.rollout_decay separate "
                "weights sample the rollouts; use one of them"
            )
        if self.reference == "old" and self.reference_guidance is not None and self.kl_coef == 0:
            raise ConfigError(
                "algorithm.reference_guidance: with reference=old and kl_coef=0 the base model is not run; remove it"
            )


@dataclass(frozen=True)
class CRDConfig(ContrastConfig):
    whole_groups = True

    name: Literal["crd"] = name_key("crd")
    regression: Literal["squared", "cross_entropy"] = key(
        "squared",
        "how the two centred rewards are matched: by their squared difference, or by the cross-entropy of the "
        "probabilities that they are the logits of",
    )
    kl_by_reward: bool = key(
        False, "weight of an image's KL by its quality: from 1e-4 for the worst to kl_coef for the best"
    )


@dataclass(frozen=True)
class DiffusionDPOConfig(PreferenceConfig):
    name: Literal["diffusion_dpo"] = name_key("diffusion_dpo")
    reference: Literal["old", "base"] = key(
        "old", "reference of the preferences: the old policy, updated periodically, or the base model"
    )

    def compared(self, n: int) -> int:
        return 2  # the best and the worst


@dataclass(frozen=True)
class RWRConfig(ForwardProcessConfig):
    name: Literal["rwr"] = name_key("rwr")
    beta: float = key(1.0, "sharpness of the softmax over the rewards of a group", above=0)


@dataclass(frozen=True)
class BestOfNConfig(ForwardProcessConfig):
    name: Literal["best_of_n"] = name_key("best_of_n")


@dataclass(frozen=True)
class SFTConfig(ForwardProcessConfig):
    needs_files = True

    name: Literal["sft"] = name_key("sft")

    @property
    def groups_of_one(self) -> bool:
        return True


@dataclass(frozen=True)
class KTOConfig(ForwardProcessConfig):
    name: Literal["kto"] = name_key("kto")
    beta: float = key(1000.0, "sharpness of preferences", above=0)
    weight_liked: float = key(1.0, "weight of images that are liked, or above the mean of their group", low=0)
    weight_disliked: float = key(1.0, "weight of the others", low=0)

    @property
    def groups_of_one(self) -> bool:
        return True


# --- The keys of the algorithms that differentiate the reward: through its scorer, the decoder, and denoising steps


def _nested_key(default: float) -> Any:
    help = "share of the gradient of the intermediate latents that passes through the denoiser's call with them"
    return key(default, help, low=0, high=1)


def _active_key(default: int, low: int = 1) -> Any:
    return main_key(
        default, "steps whose denoiser calls have a gradient, selected at random each trainer step", low=low
    )


def _tau_key(default: float) -> Any:
    return key(
        default,
        "images are weighted by 1 / (the distances of the two leaps from the sampled steps, each at least this); "
        "null: equally",
        above=0,
    )


@dataclass(frozen=True)
class RewardGradientConfig(AlgorithmConfig):
    """Images are decoded with a gradient, and the reward's goes back to the weights."""

    replays_latents = True
    differentiates = True
    without_noise: ClassVar[bool] = False  # it is defined for deterministic steps only
    needs_steps: ClassVar[int] = 1

    margin: float | None = key(
        None, "the loss is the shortfall of the reward below this, 0 above; null: the negative reward"
    )
    target: float | None = key(None, "the loss is the distance of the reward from this; null: see margin")
    loss_scale: float = key(1.0, "factor of the loss", above=0)
    decode_batch: int = key(
        1, "images decoded and scored with gradient at the same time: memory of decoder and scorers", low=1
    )

    @property
    def groups_of_one(self) -> bool:
        return True

    @property
    def carries(self) -> bool:
        """Whether the latents of a step have a gradient, not only the weights."""
        return False

    def check(self) -> None:
        super().check()
        if self.margin is not None and self.target is not None:
            raise ConfigError(
                f"algorithm.margin={self.margin} and algorithm.target={self.target}: the loss is measured from one "
                "of them; remove the other"
            )
        if self.cfg == "off":
            raise ConfigError(
                "algorithm.cfg=off: the scored images were sampled with guidance, through which the reward's "
                "gradient passes; use cfg=joint or cfg=detach_uncond"
            )
        if self.dynamic_sampling:
            raise ConfigError(
                f"algorithm.dynamic_sampling={self.dynamic_sampling}: there is a gradient even if all rewards of a "
                "group are equal; remove it"
            )

    def check_sampling(self, sampling: SamplingConfig) -> None:
        super().check_sampling(sampling)
        plain = {"solver": "euler", "compression": 1, "cache": "none"}
        for name, value in plain.items():
            if (given := getattr(sampling, name)) != value:
                raise ConfigError(
                    f"sampling.{name}={given}: {self.name} differentiates every step as it was taken; use "
                    f"sampling.{name}={value}"
                )
        if self.without_noise and sampling.kernel != "ode":
            raise ConfigError(
                f"sampling.kernel={sampling.kernel}: {self.name} is defined for steps without noise; use "
                "sampling.kernel=ode"
            )
        if sampling.num_inference_steps < self.needs_steps:
            raise ConfigError(
                f"sampling.num_inference_steps={sampling.num_inference_steps}: {self.name} needs at least "
                f"{self.needs_steps}"
            )


@dataclass(frozen=True)
class DRaFTConfig(RewardGradientConfig):
    name: Literal["draft", "alignprop"] = name_key("draft")
    last: int = main_key(1, "denoising steps, counted from the last, that the gradient passes through", low=1)
    last_std: float = key(
        0.0, "std of a normal distribution around `last` from which the number is sampled each trainer step", low=0
    )

    @property
    def carries(self) -> bool:
        return self.last > 1 or self.last_std > 0


@dataclass(frozen=True)
class DRaFTLVConfig(RewardGradientConfig):
    name: Literal["draft_lv"] = name_key("draft_lv")
    noised_copies: int = key(
        2, "times a finished image is noised again to the last step's level and that step repeated", low=1
    )


@dataclass(frozen=True)
class ReFLConfig(RewardGradientConfig):
    name: Literal["refl"] = name_key("refl")
    late: int = main_key(10, "the step whose predicted image is scored is one of this many last ones", low=1)


@dataclass(frozen=True)
class DRTuneConfig(RewardGradientConfig):
    name: Literal["drtune"] = name_key("drtune")
    late: int = main_key(10, "the step whose predicted image is scored is one of this many last ones", low=1)
    active: int = _active_key(3)


@dataclass(frozen=True)
class SRPOConfig(RewardGradientConfig):
    name: Literal["srpo"] = name_key("srpo")
    needs_steps = 3
    without_noise = True

    positive: list[str] = key(
        ["Natural-lighting", "Detail", "Detailed", "Real"],
        "words for what is wanted; one, selected at random each step",
    )
    negative: list[str] = key(
        ["Concept art", "Painting", "Anime", "Flat", "Oil"],
        "words for what is not wanted; one, selected at random each step",
    )
    levels: list[float] = key(
        [0.75, 0.964], "noise levels, lowest and highest, between which the two steps of a trainer step lie"
    )
    span: float = key(
        0.022,
        "length of a leap in noise level, as closely as the sampler's levels allow: from this far above and below "
        "a level, selected at random each step, both lead to it",
        above=0,
        high=0.5,
    )
    strength: list[float] = key(
        [0.1, 0.25],
        "in the denoising branch the reward with the positive word has the weight 1 + this: at the lowest and at the "
        "highest of algorithm.levels",
    )
    inverted_strength: list[float] = key(
        [0.3, 0.01], "the same in the inversion branch, for the reward with the negative word"
    )

    def check(self) -> None:
        super().check()
        for name in ("positive", "negative"):
            if not all(word.strip() for word in getattr(self, name) or [""]):
                raise ConfigError(f"algorithm.{name}={getattr(self, name)}: expected at least one word, and none empty")
        for name in ("strength", "inverted_strength"):
            if len(getattr(self, name)) != 2:
                raise ConfigError(
                    f"algorithm.{name}={getattr(self, name)}: expected two numbers, at the lowest and highest "
                    "noise level"
                )
        if len(self.levels) != 2 or not 0 <= self.levels[0] < self.levels[1] < 1:
            raise ConfigError(
                f"algorithm.levels={list(self.levels)}: expected the lowest and the highest noise level, from 0 to "
                "below 1"
            )


@dataclass(frozen=True)
class LeapAlignConfig(RewardGradientConfig):
    name: Literal["leapalign"] = name_key("leapalign")
    without_noise = True
    needs_steps = 2

    nested: float = _nested_key(0.3)
    tau: float | None = _tau_key(0.1)

    @property
    def carries(self) -> bool:
        return True


@dataclass(frozen=True)
class FlowBPSparseConfig(RewardGradientConfig):
    name: Literal["flowbp_sparse"] = name_key("flowbp_sparse")
    without_noise = True

    active: int = _active_key(4)
    bias: float = key(
        1.0, "later steps are likelier: step i, from 1, has a probability proportional to i to this power"
    )
    rescale: float = key(
        0.5,
            "how far the gradient is scaled up for the steps that have none: 0 not, 1 by their share of the "
            "trajectory",
        low=0, high=1,
    )  # fmt: skip


@dataclass(frozen=True)
class FlowBPBridgeConfig(FlowBPSparseConfig):
    name: Literal["flowbp_bridge"] = name_key("flowbp_bridge")  # type: ignore[assignment]  # another of the union
    needs_steps = 2

    active: int = _active_key(5, low=2)
    bias: float = key(
        4.0, "later steps are likelier: step i, from 1, has a probability proportional to i to this power"
    )
    rescale: float = key(
        0.0,
            "how far the gradient is scaled up for the steps that have none: 0 not, 1 by their share of the "
            "trajectory",
        low=0, high=1,
    )  # fmt: skip
    nested: float = _nested_key(0.5)

    @property
    def carries(self) -> bool:
        return True


@dataclass(frozen=True)
class FlowBPLagrangeConfig(RewardGradientConfig):
    name: Literal["flowbp_lagrange"] = name_key("flowbp_lagrange")
    without_noise = True
    needs_steps = 3

    supports: int = key(3, "steps of a leap whose velocities are integrated by their interpolating polynomial", low=1)
    second: float = key(
        0.25, "factor of the gradient of a leap's second support; that of the first is 1", low=0, high=1
    )
    parts: list[float] = key(
        [2.5, 6.0, 2.0],
        "Dirichlet parameters of the shares of the steps after, between and before the two leaps' starts",
    )
    latest: int | None = key(
        10, "the second leap starts at one of this many last steps, but not at the last; null: at any", low=2
    )
    nested: float = _nested_key(0.1)
    tau: float | None = _tau_key(0.2)

    @property
    def carries(self) -> bool:
        return True

    def check(self) -> None:
        super().check()
        if len(self.parts) != 3 or min(self.parts) <= 0:
            raise ConfigError(f"algorithm.parts={self.parts}: expected three positive numbers")


@dataclass(frozen=True)
class MixedGradientConfig(DRaFTConfig, FlowGRPOConfig):
    """A policy gradient of the whole reward, and the gradient of that part of it that has one."""

    name: Literal["mixed_gradient"] = name_key("mixed_gradient")  # type: ignore[assignment]  # another of the union

    policy_weight: float = key(1.0, "weight of the policy gradient", above=0)
    gradient_weight: float = key(1.0, "weight of the reward's gradient", above=0)

    @property
    def groups_of_one(self) -> bool:
        return self.history > 0 or self.adv_estimator == "reinforce_pp"


# --- The keys of the algorithms that learn from teachers, step by step, rather than from rewards


@dataclass(frozen=True)
class OPDConfig(AlgorithmConfig):
    replays_latents = True

    name: Literal["opd"] = name_key("opd")
    teachers: list[dict[str, Any]] = main_key(
        [{"guidance": 4.5}],
        "what to learn from: [{lora: CHECKPOINT, data_source: ocr}, {path: PIPELINE, data_source: colour}]; "
        "without lora and path it is the base model, with another guidance scale",
    )
    distance: StepDistance = main_key(
        "gaussian",
        "distance of a step to the teacher's: the KL of the two Gaussians; half the squared distance of their "
        "means, also of steps without noise; or the squared distance of the outputs, which weighs all steps equally",
    )
    timesteps: int | None = main_key(
        None, "noise levels trained per trainer step; null: all in the range", low=1
    )  # of those with noise, if there is any

    @property
    def groups_of_one(self) -> bool:
        return True

    @property
    def taught_by(self) -> list[Teacher]:
        """The entries of `teachers`."""
        return teachers(self.teachers)

    def check(self) -> None:
        super().check()
        if not self.taught_by:
            raise ConfigError(
                f"algorithm.teachers=[]: {self.name} learns from teachers; add one, such as "
                "'algorithm.teachers=[{lora: CHECKPOINT}]'"
            )
        if self.dynamic_sampling:
            raise ConfigError(
                f"algorithm.dynamic_sampling={self.dynamic_sampling}: {self.name} learns from all images, "
                "regardless of their rewards; use 0"
            )

    def check_sampling(self, sampling: SamplingConfig) -> None:
        if self.distance == "gaussian" and (sampling.noise_level == 0 or sampling.kernel == "ode"):
            name = "kernel=ode" if sampling.kernel == "ode" else "noise_level=0"
            raise ConfigError(
                f"sampling.{name}: steps without noise have no KL to the teacher; use algorithm.distance=mean or "
                "velocity, or kernel=cps with noise_level=0.8"
            )
        for teacher in self.taught_by:
            same = teacher.guidance is not None and teacher.guidance == sampling.guidance_scale and not teacher.call
            if teacher.is_base and same and self.cfg != "off":
                raise ConfigError(
                    f"algorithm.teachers={shown(self.teachers)}: the base model with the guidance of the rollout "
                    "is identical to the initial student; set another guidance, or lora or path"
                )


@dataclass(frozen=True)
class DMDRConfig(FlowGRPOConfig):
    imitates = True

    name: Literal["dmdr"] = name_key("dmdr")  # type: ignore[assignment]
    teachers: list[dict[str, Any]] = key(
        [],
        "the model whose images a few-step model should match, [{path: PIPELINE, guidance: 4.5}]; []: the model "
        "that training starts from",
    )
    matching_coef: float = main_key(0.01, "weight of distribution matching", low=0)
    matching_steps: int = key(
        20, "noise levels at which images are compared: those of this many denoising steps", low=2, high=1000
    )
    fake_scale: float = key(
        2.0,
        "alpha of the LoRA that imitates the images, relative to that of the trained one: how fast it follows",
        above=0,
    )

    @property
    def taught_by(self) -> list[Teacher]:
        return teachers(self.teachers)

    def check(self) -> None:
        super().check()
        if len(self.taught_by) > 1 or any(t.data_source is not None for t in self.taught_by):
            raise ConfigError(
                f"algorithm.teachers={shown(self.teachers)}: {self.name} compares with one model, for all prompts; "
                "give one entry without data_source"
            )


# --- The block `algorithm`: a class for each algorithm with the keys that it reads, their defaults, and facts about it.
#
# `algorithm.name` says which class it is; presets that differ only in how they sample share one. A key that several
# algorithms read stands in a class that they inherit from. What an algorithm does is in `gerl/algorithms`.

AnyAlgorithm = Annotated[
    FlowGRPOConfig | GRPOGuardConfig | FlowDPPOConfig | TempFlowGRPOConfig | DenseGRPOConfig | BranchGRPOConfig
    | FDFOConfig | NeighborGRPOConfig | DiffusionNFTConfig | AWMConfig | DGPOConfig | CRDConfig | DiffusionDPOConfig
    | OPDConfig | DMDRConfig | SFTConfig | KTOConfig
    | ReFLConfig | DRaFTConfig | DRaFTLVConfig | DRTuneConfig | SRPOConfig | LeapAlignConfig | FlowBPSparseConfig
    | FlowBPBridgeConfig | FlowBPLagrangeConfig | MixedGradientConfig
    | RWRConfig | BestOfNConfig,
    Field(discriminator="name"),
]  # fmt: skip
BY_NAME: dict[str, type[AlgorithmConfig]] = {
    name: cls for cls in get_args(get_args(AnyAlgorithm)[0]) for name in cls.names()
}


def algorithm_config(name: str = "flow_grpo", **keys: Any) -> AnyAlgorithm:
    """The configuration of the algorithm `name` with `keys`; raises `KeyError` on a name that there is not."""
    return cast(AnyAlgorithm, BY_NAME[name](name, **keys))
