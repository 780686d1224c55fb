"""The keys and facts that algorithms of several kinds share."""

from dataclasses import dataclass
from typing import Any, ClassVar, get_args

from gerl.config.choices import AdvantageEstimator, CfgMode, DiversityShaping, StdKind
from gerl.config.sampling import SamplingConfig
from gerl.config.schema import Block, key, main_key
from gerl.config.teachers import Teacher


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

    def drawn_together(self, n: int) -> int:
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
