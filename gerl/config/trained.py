"""Checks of a configuration that trains all weights or parts of them, or a second LoRA."""

from gerl.config.parts import Settings
from gerl.errors import ConfigError


def check_trained(config: Settings) -> None:
    """Raise `ConfigError` where what is trained does not go with the rest."""
    based = any(teacher.is_base for teacher in config.algorithm.taught_by)
    if config.model.train != "lora" and config.algorithm.moves_reference and based:
        raise ConfigError(
            f"model.train={config.model.train}: the initial model is kept once, and a moving KL reference would "
            "need another copy; use algorithm.kl_reset_every=0 and kl_reset_above=null, or model.train=lora"
        )
    if config.model.train != "lora" and config.algorithm.imitates:
        raise ConfigError(
            f"model.train={config.model.train}: {config.algorithm.name} trains a second LoRA next to the first; "
            "use model.train=lora"
        )
    if config.algorithm.imitates and config.lockstep:
        raise ConfigError(
            f"cluster.ranks_per_worker={config.cluster.ranks_per_worker}: {config.algorithm.name} does not support "
            "sharded weights or tokens yet; use 1"
        )
    if config.model.train != "lora" and (taught := [t for t in config.algorithm.taught_by if t.lora is not None]):
        raise ConfigError(
            f"algorithm.teachers: lora={taught[0].lora} would be a LoRA next to the trained one, and with "
            f"model.train={config.model.train} there is none; use model.train=lora, or merge it into its own "
            "pipeline and give that as path"
        )
    if config.model.train != "lora" and config.cluster.context > 1:
        raise ConfigError(
            f"cluster.context={config.cluster.context}: tokens split among ranks do not support "
            f"model.train={config.model.train} yet; use cluster.context=1, or model.train=lora"
        )
    if config.model.train != "lora" and config.actor.optimizer != "adamw":
        raise ConfigError(
            f"actor.optimizer={config.actor.optimizer}: it supports a LoRA only, and "
            f"model.train={config.model.train}; use actor.optimizer=adamw, or model.train=lora"
        )
