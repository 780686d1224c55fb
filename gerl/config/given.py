"""Checks of a configuration that trains on images of files."""

from gerl.config.data import sources
from gerl.config.parts import Settings
from gerl.errors import ConfigError

FILES = "data.train_on=files"


def check_given(config: Settings) -> None:
    """Raise `ConfigError` where images of files and the other keys contradict each other."""
    algorithm = config.algorithm
    _check_regularise(config)
    if config.data.train_on == "drawn":
        config.reward.check_weights()
        if algorithm.needs_files:
            raise ConfigError(
                f"algorithm.name={algorithm.name}: it imitates existing images; set {FILES} and data.train to a "
                "file that lists them, or use algorithm=best_of_n, which imitates the best sampled ones"
            )
        return
    if algorithm.replays_latents:
        raise ConfigError(
            f"{FILES}: {algorithm.name} learns from the sampling steps of an image, which a file does not have; "
            "use algorithm=diffusion_dpo_offline, kto or sft, or another that learns from noised images"
        )
    if algorithm.dynamic_sampling:
        raise ConfigError(
            f"algorithm.dynamic_sampling={algorithm.dynamic_sampling}: it samples replacements for images without "
            f"a signal, and with {FILES} none are sampled; remove it"
        )
    if algorithm.kl_share < 1 or getattr(algorithm, "diversity", "none") != "none":
        raise ConfigError(
            f"{FILES}: algorithm.kl_share and algorithm.diversity need scores of the training images, and those "
            "from files are not scored; remove them"
        )
    if config.trainer.staleness:
        raise ConfigError(
            f"trainer.staleness={config.trainer.staleness}: with {FILES} no images are sampled; remove it"
        )
    if config.cluster.layout == "split":
        raise ConfigError(f"cluster.layout=split: with {FILES} no worker has anything to sample; use hybrid")
    if config.lockstep:
        raise ConfigError(
            f"{FILES}: each rank encodes images independently, which model.shard={config.model.shard} and "
            f"cluster.context={config.cluster.context} do not support yet; use cluster.context=1 and "
            "model.shard=none"
        )


def _check_regularise(config: Settings) -> None:
    given, coef = config.data.regularise, config.algorithm.data_coef
    if given is None:
        return
    sources(given, "data.regularise", weighted=False)
    if not coef:
        raise ConfigError(
            "data.regularise: the images have no weight in the loss, since algorithm.data_coef=0; set it, such as "
            "algorithm.data_coef=0.01, or remove data.regularise"
        )
    if config.data.train_on == "files":
        raise ConfigError(
            f"data.regularise: it is for runs that sample, and with {FILES} nothing is sampled; remove it"
        )
    if config.algorithm.subtracts_kl and config.algorithm.kl_coef > 0:
        raise ConfigError("data.regularise: algorithm.kl_in_reward would penalise images from files as well; use false")
    if config.trainer.staleness or config.lockstep or config.cluster.layout == "split":
        raise ConfigError(
            "data.regularise: images from files are not supported yet with trainer.staleness, "
            "cluster.layout=split, cluster.context and model.shard; remove these"
        )
