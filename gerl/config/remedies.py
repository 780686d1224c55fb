"""The keys against reward hacking and what they work with: a KL, watched scorers, held-out prompts."""

from collections.abc import Mapping, Sequence

from gerl.config.algorithm_keys import AlgorithmConfig, ShapedConfig
from gerl.config.blocks import ScorerConfig
from gerl.config.parts import Settings
from gerl.errors import ConfigError


def check_remedies(config: Settings) -> None:
    """Raise `ConfigError` where a remedy lacks what it works with."""
    algorithm, guard = config.algorithm, config.guard
    if guard.raises_kl and config.validation.data is None:
        raise ConfigError(
            f"guard.action={guard.action}: it acts on held-out images, and validation.data=null; set held-out "
            "prompts, or use guard.action=warn"
        )
    given = {"kl_share": algorithm.kl_share < 1, "kl_reset_every": algorithm.kl_reset_every > 0}
    given["kl_reset_above"] = algorithm.kl_reset_above is not None
    for name, asked in given.items():
        if asked and algorithm.kl_coef == 0 and not guard.raises_kl:
            raise ConfigError(
                f"algorithm.{name}={getattr(algorithm, name)}: there is no KL, since algorithm.kl_coef=0; set a "
                "weight, such as algorithm.kl_coef=0.04, or remove it"
            )
    if algorithm.kl_share < 1:
        doubters(algorithm, config.reward.scorers)
    held_out = [name for name, scorer in config.reward.scorers.items() if scorer.during == "validation"]
    if held_out and config.validation.data is None:
        raise ConfigError(
            f"reward.scorers.{held_out[0]}.during=validation: there are no held-out prompts; set validation.data, "
            "or remove it"
        )
    if isinstance(algorithm, ShapedConfig) and algorithm.diversity != "none":
        name = algorithm.diversity_scorer
        if name.split("/")[0] in held_out:
            raise ConfigError(
                f"algorithm.diversity={algorithm.diversity}: {name} runs during validation only; remove "
                f"reward.scorers.{name.split('/')[0]}.during"
            )
        if name.split("/")[0] not in config.reward.scorers:
            raise ConfigError(
                f"algorithm.diversity={algorithm.diversity}: there is no scorer {name!r} to measure dissimilarity; "
                f"add one, such as +reward.scorers.{name.split('/')[0]}.weight=0, or name it in "
                "algorithm.diversity_scorer"
            )


def doubters(algorithm: AlgorithmConfig, scorers: Mapping[str, ScorerConfig]) -> Sequence[str]:
    """The watched scorers that `algorithm.kl_share` asks; raises `ConfigError` if there are none, or no such ones."""
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
