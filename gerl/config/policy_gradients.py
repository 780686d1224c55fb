"""The keys of the algorithms that train at the latents of a trajectory: policy gradients, pairs, neighbours."""

import math
from dataclasses import dataclass, replace
from typing import Literal

from gerl.config.algorithm_keys import AlgorithmConfig, ClippedConfig, DownSampledConfig, NormalisedConfig, name_key
from gerl.config.choices import KLKind, NodeStdKind, StepLikelihood, StepWeighting
from gerl.config.sampling import SamplingConfig
from gerl.config.schema import key, main_key
from gerl.errors import ConfigError


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

    def drawn_together(self, n: int) -> int:
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

    def drawn_together(self, n: int) -> int:
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
