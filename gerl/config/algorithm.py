"""The block `algorithm`: a class for each algorithm with the keys that it reads, their defaults, and facts about it.

`algorithm.name` says which class it is; presets that differ only in how they sample share one. A key that several
algorithms read stands in a class that they inherit from. What an algorithm does is in `gerl/algorithms`.
"""

from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, cast, get_args

from pydantic import Field

from gerl.config.choices import (
    AdvantageEstimator,
    CfgMode,
    KLKind,
    LikelihoodWeighting,
    NodeStdKind,
    StdKind,
    StepWeighting,
)
from gerl.config.sampling import SamplingConfig
from gerl.config.schema import Block, key, main_key
from gerl.errors import ConfigError


def _name(default: str) -> Any:
    help = "the algorithm; `algorithm=NAME` on the command line picks it with its published settings"
    return main_key(default, help)


def _cfg(default: CfgMode) -> Any:
    halves = "gradient through both halves; only the conditional one; or off (CFG distillation)"
    return main_key(default, f"guidance in the update: {halves}")


@dataclass(frozen=True)
class AlgorithmConfig(Block):
    """The keys that every algorithm reads, and the facts that others ask for."""

    whole_groups: ClassVar[bool] = False  # the images of a group are needed in one micro-batch
    scores_steps: ClassVar[bool] = False  # it scores the rollout's noise: on policy the ratio to what was recorded is 1
    replays_latents: ClassVar[bool] = False  # it trains at the latents of the trajectory, not at images noised again
    branches: ClassVar[bool] = False  # trajectories split: the tree says which steps are stochastic

    name: str
    cfg: CfgMode = _cfg("joint")
    kl_coef: float = main_key(0.0, "weight of the distance to the base model; at 0 no reference pass is run", low=0)
    advantage_clip: float = key(5.0, "advantages are clipped to +- this", above=0)
    dynamic_sampling: int = key(
        0, "times a step draws further prompts in place of groups whose rewards are all equal (DAPO)", low=0
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

    def compared(self, n: int) -> int:
        """How many of the `n` images of a group an update must see at once."""
        return n if self.whole_groups else 1

    @property
    def clip_range(self) -> tuple[float, float] | None:
        """How far below and above 1 the ratio may go; None where it is not bounded."""
        return None

    @property
    def subtracts_kl(self) -> bool:
        """Whether the KL to the base model is subtracted from the rewards rather than added to the loss."""
        return False

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
        "group", "what the centred rewards are divided by: the group's std, the batch's, or nothing (Dr. GRPO)"
    )

    @property
    def groups_of_one(self) -> bool:
        return self.adv_estimator == "reinforce_pp"


@dataclass(frozen=True)
class ClippedConfig(AlgorithmConfig):
    """The ratio to the policy that drew has bounds."""

    clip_low: float = main_key(1e-4, "lower bound of the ratio is 1 - this", above=0, high=1)
    clip_high: float = main_key(1e-4, "upper bound of the ratio is 1 + this", above=0)

    @property
    def clip_range(self) -> tuple[float, float]:
        return self.clip_low, self.clip_high


# --- policy gradients


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

    def check(self) -> None:
        super().check()
        if self.kl_type == "k1" and not self.subtracts_kl:
            raise ConfigError(
                "algorithm.kl_type=k1: on policy its gradient is 0 on average, so in the loss it does nothing; use "
                f"gaussian or k2{'' if self.branches else ', or algorithm.kl_in_reward=true'}"
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
        "factor of each step's loss, of which the gradient is J / std times the noise: 1, std, 1/|dt|, 1/|J|, "
        "std |dt| / |J| (PCPO), or std^2 / |J|; python -m gerl.preflight signal=4 measures which carries the reward",
    )

    @property
    def step_weighting(self) -> StepWeighting:
        return self.timestep_weights


@dataclass(frozen=True)
class ChainConfig(WeightedConfig, NormalisedConfig):
    """Every image has a trajectory of its own."""

    kl_in_reward: bool = key(False, "subtract the KL from the reward rather than add it to the loss")
    timestep_fraction: float = key(
        1.0, "share of the stochastic steps that are trained, drawn anew each step", above=0, high=1
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
                f"algorithm.kl_in_reward=true: it works from what the rollout recorded, kl_type={self.kl_type} "
                "cannot; use kl_type=gaussian, or put the KL in the loss"
            )


@dataclass(frozen=True)
class TreeConfig(PolicyGradientConfig, ClippedConfig):
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
                f"sampling.window_size, compression and same_init_noise have no meaning for "
                f"{self.name}, whose tree says which steps are stochastic; leave them at their defaults"
            )


@dataclass(frozen=True)
class FlowGRPOConfig(ChainConfig, ClippedConfig):
    name: Literal["flow_grpo", "flow_grpo_fast", "dance_grpo", "mix_grpo", "ddpo"] = _name("flow_grpo")


@dataclass(frozen=True)
class GRPOGuardConfig(ChainConfig, ClippedConfig):
    name: Literal["grpo_guard"] = _name("grpo_guard")


@dataclass(frozen=True)
class FlowDPPOConfig(ChainConfig):
    name: Literal["flow_dppo"] = _name("flow_dppo")
    kl_threshold: float = main_key(1e-5, "KL to the rollout's policy beyond which a step stops", above=0)


@dataclass(frozen=True)
class TempFlowGRPOConfig(WeightedConfig, TreeConfig, NormalisedConfig):
    name: Literal["tempflow_grpo"] = _name("tempflow_grpo")


@dataclass(frozen=True)
class DenseGRPOConfig(WeightedConfig, ClippedConfig, NormalisedConfig):
    branches = True

    name: Literal["dense_grpo"] = _name("dense_grpo")

    def check_sampling(self, sampling: SamplingConfig) -> None:
        super().check_sampling(sampling)
        if sampling.compression < 1:
            raise ConfigError(
                f"sampling.compression={sampling.compression}: {self.name} makes an image of the latents of every "
                "step, which must be comparable; use 1"
            )


@dataclass(frozen=True)
class BranchGRPOConfig(TreeConfig):
    name: Literal["branch_grpo", "tree_grpo"] = _name("branch_grpo")
    split_steps: list[int] | None = key(
        [0, 2, 4], "steps at which a trajectory splits; null: those of the window, the only ones with noise (TreeGRPO)"
    )
    node_std: NodeStdKind = key(
        "depth", "what a node's advantage is divided by: the std of the nodes of its depth, or of the leaves (TreeGRPO)"
    )

    def check(self) -> None:
        super().check()
        splits = self.split_steps
        if splits is not None and (not splits or sorted(set(splits)) != list(splits)):
            raise ConfigError(f"algorithm.split_steps={list(splits)}: give rising step indices")

    def check_sampling(self, sampling: SamplingConfig) -> None:
        if self.split_steps is None:
            if sampling.window_size is None or sampling.window_per == "group":
                raise ConfigError(
                    "algorithm.split_steps=null: trees split at the steps of a window, give a sampling.window_size and "
                    "window_per=step"
                )
            sampling = replace(sampling, window_size=None, window_schedule="random")  # here they have a meaning
        super().check_sampling(sampling)
        last = sampling.steps_range[1] - 1
        if self.split_steps is not None and self.split_steps[-1] > last:
            raise ConfigError(
                f"algorithm.split_steps={list(self.split_steps)}: the last stochastic step is {last}, split before"
            )


# --- learning from neighbours


@dataclass(frozen=True)
class NeighborGRPOConfig(NormalisedConfig, ClippedConfig):
    whole_groups = True
    replays_latents = True

    name: Literal["neighbor_grpo"] = _name("neighbor_grpo")
    timesteps: int | None = main_key(
        None, "noise levels trained per trainer step, spread over the range; null: all of it", low=1
    )
    anchors: int = key(4, "images of a group that are trained, drawn anew each step", low=1)
    temperature: float = key(1.0, "mean squared distance of latents at which a neighbour counts 1/e", above=0)
    quasi_norm: float = key(
        0.8, "p of the norm that divides advantages: below 2, groups without clear winners count less", above=0, high=2
    )

    def compared(self, n: int) -> int:
        return 1  # its neighbours are known from the rollout

    def check_sampling(self, sampling: SamplingConfig) -> None:
        if sampling.kernel != "ode" or sampling.solver != "euler":
            given = f"kernel={sampling.kernel}" if sampling.kernel != "ode" else f"solver={sampling.solver}"
            raise ConfigError(
                f"sampling.{given}: {self.name} compares Euler steps without noise, use kernel=ode with solver=euler"
            )
        if not sampling.same_init_noise or sampling.init_noise_spread == 0:
            raise ConfigError(
                f"sampling.init_noise_spread={sampling.init_noise_spread}: {self.name} compares images whose initial "
                "noises lie near each other; use same_init_noise=true with init_noise_spread=0.3"
            )


# --- learning from noised images


@dataclass(frozen=True)
class ForwardProcessConfig(AlgorithmConfig):
    """Finished images are noised again, and the loss compares outputs at some noise levels."""

    cfg: CfgMode = _cfg("off")
    timesteps: int | None = main_key(
        None, "noise levels trained per trainer step, spread over the range; null: all of it", low=1
    )
    old_decay: list[float] = key(
        [0.0, 0.0, 0.0, 0.0],
        "decay of the old policy, averaged once a trainer step: [hold, start, slope, limit] is start for `hold` steps, "
        "then rises by slope a step to limit",
    )
    old_every: int = key(1, "trainer steps between updates of the old policy", low=1)
    rollout_decay: list[float] | None = key(
        None, "the same of the weights that draw rollouts; null: the trained weights"
    )
    old_kl_coef: float = key(0.0, "weight of the squared distance to the old policy", low=0)

    def check(self) -> None:
        super().check()
        for name, value in (("old_decay", self.old_decay), ("rollout_decay", self.rollout_decay)):
            if value is not None and (len(value) != 4 or not (0 <= value[1] <= 1 and 0 <= value[3] <= 1)):
                raise ConfigError(f"algorithm.{name}={list(value)}: give [hold, start, slope, limit], decays in [0, 1]")


@dataclass(frozen=True)
class ContrastConfig(ForwardProcessConfig, NormalisedConfig):
    """The policy is compared with the old one by what it implies."""

    mix: float = key(1.0, "b: how far the implicit policies lie from the old one", above=0)


@dataclass(frozen=True)
class PreferenceConfig(ForwardProcessConfig):
    """The images of a group are preferred to each other, at noise that they share."""

    whole_groups = True

    beta: float = key(100.0, "sharpness of preferences", above=0)


@dataclass(frozen=True)
class DiffusionNFTConfig(ContrastConfig):
    name: Literal["diffusion_nft"] = _name("diffusion_nft")


@dataclass(frozen=True)
class AWMConfig(ForwardProcessConfig, NormalisedConfig, ClippedConfig):
    name: Literal["awm"] = _name("awm")
    weighting: LikelihoodWeighting = key("uniform", "likelihood weight of a noise level")


@dataclass(frozen=True)
class DGPOConfig(PreferenceConfig, NormalisedConfig, ClippedConfig):
    name: Literal["dgpo"] = _name("dgpo")


@dataclass(frozen=True)
class CRDConfig(ContrastConfig):
    whole_groups = True

    name: Literal["crd"] = _name("crd")


@dataclass(frozen=True)
class DiffusionDPOConfig(PreferenceConfig):
    name: Literal["diffusion_dpo"] = _name("diffusion_dpo")

    def compared(self, n: int) -> int:
        return 2  # the best and the worst


@dataclass(frozen=True)
class RWRConfig(ForwardProcessConfig):
    name: Literal["rwr"] = _name("rwr")
    beta: float = key(1.0, "sharpness of the softmax over the rewards of a group", above=0)


@dataclass(frozen=True)
class BestOfNConfig(ForwardProcessConfig):
    name: Literal["best_of_n"] = _name("best_of_n")


AnyAlgorithm = Annotated[
    FlowGRPOConfig | GRPOGuardConfig | FlowDPPOConfig | TempFlowGRPOConfig | DenseGRPOConfig | BranchGRPOConfig
    | NeighborGRPOConfig | DiffusionNFTConfig | AWMConfig | DGPOConfig | CRDConfig | DiffusionDPOConfig | RWRConfig
    | BestOfNConfig,
    Field(discriminator="name"),
]  # fmt: skip
BY_NAME: dict[str, type[AlgorithmConfig]] = {
    name: cls for cls in get_args(get_args(AnyAlgorithm)[0]) for name in cls.names()
}


def algorithm_config(name: str = "flow_grpo", **keys: Any) -> AnyAlgorithm:
    """The configuration of the algorithm `name` with `keys`; raises `KeyError` on a name that there is not."""
    return cast(AnyAlgorithm, BY_NAME[name](name, **keys))
