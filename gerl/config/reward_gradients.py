"""The keys of the algorithms that differentiate the reward: through its scorer, the decoder, and denoising steps."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from gerl.config.algorithm_keys import AlgorithmConfig, name_key
from gerl.config.policy_gradients import FlowGRPOConfig
from gerl.config.sampling import SamplingConfig
from gerl.config.schema import key, main_key
from gerl.errors import ConfigError


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
