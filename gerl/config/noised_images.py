"""The keys of the algorithms that noise finished images again and compare outputs at some noise levels."""

from dataclasses import dataclass
from typing import Literal

from gerl.config.algorithm_keys import (
    AlgorithmConfig,
    ClippedConfig,
    DownSampledConfig,
    ShapedConfig,
    cfg_key,
    name_key,
)
from gerl.config.choices import CfgMode, LevelDraw, LikelihoodWeighting
from gerl.config.schema import key, main_key
from gerl.errors import ConfigError


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
