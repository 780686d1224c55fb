"""The blocks `sampling` and `algorithm`: how trajectories are drawn, and what is learnt from them."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, get_args

from gerl.config.schema import Block, key
from gerl.errors import ConfigError

PolicyGradientName = Literal[
    "flow_grpo", "flow_grpo_fast", "dance_grpo", "mix_grpo", "grpo_guard", "flow_dppo", "tempflow_grpo", "branch_grpo",
    "ddpo",
]  # fmt: skip
ForwardProcessName = Literal["diffusion_nft", "awm", "dgpo", "crd", "diffusion_dpo", "rwr", "best_of_n"]
POLICY_GRADIENT: tuple[str, ...] = get_args(PolicyGradientName)
FORWARD_PROCESS: tuple[str, ...] = get_args(ForwardProcessName)
TREES = ("tempflow_grpo", "branch_grpo")
CHAINS = tuple(name for name in POLICY_GRADIENT if name not in TREES)
CLIPPED = (*(name for name in POLICY_GRADIENT if name != "flow_dppo"), "awm", "dgpo")


@dataclass(frozen=True)
class SamplingConfig(Block):
    height: int | None = key(None, "image height in pixels; null: the pipeline's own default", low=8)
    width: int | None = key(None, "image width in pixels; null: the pipeline's own default", low=8)
    num_inference_steps: int = key(10, "denoising steps of a training rollout", low=2)
    guidance_scale: float | None = key(None, "passed to the pipeline; null: the pipeline's own default", low=0)
    sigmas: Literal["scheduler", "linear"] = key(
        "scheduler", "noise levels of a training rollout: the scheduler's own, or linspace(1, 1/steps) before its shift"
    )
    kernel: Literal["ode", "flow_sde", "dance_sde", "cps", "precise", "dance_precise", "ddim"] = key(
        "flow_sde", "transition kernel of the stochastic steps; ddim also for epsilon-prediction DDIM; ode: none is"
    )
    noise_level: float = key(0.7, "noise of the stochastic steps (eta of the kernel's paper)", low=0)
    solver: Literal["euler", "dpm2"] = key("euler", "ODE solver of the other steps; dpm2: DPM-Solver++(2M)")
    compression: float = key(
        1.0, "share of the steps after the window that are taken, each the longer (MixGRPO-Flash)", above=0, high=1
    )
    same_init_noise: bool = key(False, "the images of a group start from the same noise (DanceGRPO)")
    window_size: int | None = key(
        None, "number of consecutive stochastic (trained) steps; null: all but the last", low=1
    )
    window_range: list[int] | None = key(
        None, "[first, end) of the steps a window may cover or a noise level be taken from; null: all but the last"
    )
    window_schedule: Literal["random", "progressive", "decay"] = key(
        "random", "where the window is: drawn; moving on by its size; or moving on ever faster (MixGRPO)"
    )
    window_every: int = key(1, "trainer steps for which a window stays where it is", low=1)
    window_per: Literal["step", "group"] = key("step", "one random window per trainer step, or per group")
    call: dict[str, Any] = key({}, "further keyword arguments of the pipeline's __call__, such as max_sequence_length")

    def check(self) -> None:
        if self.kernel == "cps" and self.noise_level > 1:
            raise ConfigError(f"sampling.noise_level={self.noise_level}: cps takes at most 1, which re-noises fully")
        if self.window_schedule != "random" and (self.window_size is None or self.window_per == "group"):
            raise ConfigError(
                f"sampling.window_schedule={self.window_schedule}: a window that moves needs a "
                "sampling.window_size and window_per=step"
            )
        if self.compression < 1 and self.solver == "euler":
            raise ConfigError(
                f"sampling.compression={self.compression}: longer steps need the second-order sampling.solver=dpm2"
            )
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
class AlgorithmConfig(Block):
    name: PolicyGradientName | ForwardProcessName = key(
        "flow_grpo", "the algorithm; `algorithm=NAME` on the command line picks it with its published settings"
    )
    adv_estimator: Literal["grpo", "rloo", "reinforce_pp", "gdpo"] = key(
        "grpo",
        "baseline: mean of the group; of its other members; of the batch; or each scorer normalised before the sum",
    )
    advantage_std: Literal["group", "batch", "none"] = key(
        "group", "what the centred rewards are divided by: the group's std, the batch's, or nothing (Dr. GRPO)"
    )
    advantage_clip: float = key(5.0, "advantages are clipped to +- this", above=0)
    dynamic_sampling: int = key(
        0, "times a step draws further prompts in place of groups whose rewards are all equal (DAPO)", low=0
    )
    cfg: Literal["joint", "detach_uncond", "off"] = key(
        "joint",
        "guidance in the update: gradient through both halves; only the conditional one; or off (CFG distillation)",
    )
    kl_coef: float = key(0.0, "weight of the distance to the base model; at 0 no reference pass is run", low=0)
    kl_type: Literal["gaussian", "flow_grpo", "velocity", "k1", "k2", "k3"] = key(
        "gaussian",
        "the true KL of a step; |dt| times it; squared velocity; or sampled estimators",
        only=POLICY_GRADIENT,
    )
    kl_in_reward: bool = key(
        False, "subtract the KL from the reward rather than add it to the loss", only=POLICY_GRADIENT
    )
    clip_low: float = key(1e-4, "lower bound of the ratio is 1 - this", above=0, high=1, only=CLIPPED)
    clip_high: float = key(1e-4, "upper bound of the ratio is 1 + this", above=0, only=CLIPPED)
    kl_threshold: float = key(
        1e-5, "KL to the rollout's policy beyond which a step stops", above=0, only=("flow_dppo",)
    )
    timestep_fraction: float = key(
        1.0, "share of the stochastic steps that are trained, drawn anew each step", above=0, high=1, only=CHAINS
    )
    timestep_weights: Literal["uniform", "std", "inverse_dt", "inverse_jacobian"] = key(
        "uniform", "factor of each step's loss; std: std_k / mean(std)", only=(*CHAINS, "tempflow_grpo")
    )
    history: int = key(
        0, "rewards kept per prompt whose mean and std normalise; 0: those of the group", low=0, only=CHAINS
    )
    branch_factor: int = key(2, "children of a node of a tree", low=2, only=TREES)
    split_steps: list[int] = key([0, 2, 4], "steps at which a trajectory splits", only=("branch_grpo",))
    timesteps: int | None = key(
        None,
        "noise levels trained per trainer step, spread over the range; null: all of it",
        low=1,
        only=FORWARD_PROCESS,
    )
    old_decay: list[float] = key(
        [0.0, 0.0, 0.0, 0.0],
        "decay of the old policy, averaged once a trainer step: [hold, start, slope, limit] is start for `hold` steps, "
        "then rises by slope a step to limit",
        only=FORWARD_PROCESS,
    )
    old_every: int = key(1, "trainer steps between updates of the old policy", low=1, only=FORWARD_PROCESS)
    rollout_decay: list[float] | None = key(
        None, "the same of the weights that draw rollouts; null: the trained weights", only=FORWARD_PROCESS
    )
    old_kl_coef: float = key(0.0, "weight of the squared distance to the old policy", low=0, only=FORWARD_PROCESS)
    mix: float = key(
        1.0, "b: how far the implicit policies lie from the old one", above=0, only=("diffusion_nft", "crd")
    )
    beta: float = key(
        100.0,
        "sharpness of preferences; rwr: of the softmax over rewards",
        above=0,
        only=("dgpo", "diffusion_dpo", "rwr"),
    )
    weighting: Literal["uniform", "t", "t2", "huber", "ghuber"] = key(
        "uniform", "likelihood weight of a noise level", only=("awm",)
    )

    def check(self) -> None:
        for f in dataclasses.fields(self):
            default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
            only = f.metadata["only"]
            if only and self.name not in only and getattr(self, f.name) != default:
                raise ConfigError(
                    f"algorithm.{f.name}={getattr(self, f.name)}: {self.name} does not read it, only {', '.join(only)}"
                )
        if self.kl_in_reward and (self.kl_type == "velocity" or self.name in TREES):
            raise ConfigError(
                f"algorithm.kl_in_reward=true: it works from what the rollout recorded, kl_type={self.kl_type} of "
                f"{self.name} cannot; use kl_type=gaussian and no branches, or put the KL in the loss"
            )
        if self.kl_type == "k1" and not self.kl_in_reward:
            raise ConfigError(
                "algorithm.kl_type=k1: on policy its gradient is 0 on average, so in the loss it does nothing; use "
                "gaussian or k2, or algorithm.kl_in_reward=true"
            )
        for name in ("old_decay", "rollout_decay"):
            value = getattr(self, name)
            if value is not None and (len(value) != 4 or not (0 <= value[1] <= 1 and 0 <= value[3] <= 1)):
                raise ConfigError(f"algorithm.{name}={list(value)}: give [hold, start, slope, limit], decays in [0, 1]")
        if self.name == "branch_grpo" and (
            not self.split_steps or sorted(set(self.split_steps)) != list(self.split_steps)
        ):
            raise ConfigError(f"algorithm.split_steps={list(self.split_steps)}: give rising step indices")

    @property
    def is_policy_gradient(self) -> bool:
        """Whether it scores the noise of the rollout's steps, rather than learning from noised images."""
        return self.name in POLICY_GRADIENT
