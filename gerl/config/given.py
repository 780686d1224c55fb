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
                f"algorithm.name={algorithm.name}: it imitates images that you have; set {FILES} and data.train to a "
                "file that names them, or use algorithm=best_of_n, which imitates the best that are drawn"
            )
        return
    if algorithm.replays_latents:
        raise ConfigError(
            f"{FILES}: {algorithm.name} learns from the steps in which an image was drawn, which a file does not have; "
            "use algorithm=diffusion_dpo_offline, kto or sft, or another that learns from noised images"
        )
    if algorithm.dynamic_sampling:
        raise ConfigError(
            f"algorithm.dynamic_sampling={algorithm.dynamic_sampling}: it draws in place of images that teach nothing, "
            f"and with {FILES} none are drawn; leave it out"
        )
    if algorithm.kl_share < 1 or getattr(algorithm, "diversity", "none") != "none":
        raise ConfigError(
            f"{FILES}: algorithm.kl_share and algorithm.diversity ask scorers about the images trained on, and those "
            "of files are not scored; leave them out"
        )
    if config.trainer.staleness:
        raise ConfigError(
            f"trainer.staleness={config.trainer.staleness}: with {FILES} no image waits to be drawn; leave it out"
        )
    if config.cluster.layout == "split":
        raise ConfigError(f"cluster.layout=split: with {FILES} no worker has anything to draw; use hybrid")
    if config.lockstep:
        raise ConfigError(
            f"{FILES}: images are encoded by each rank by itself, which model.shard={config.model.shard} and "
            f"cluster.context={config.cluster.context} do not allow yet; use cluster.context=1 and model.shard=none"
        )


def _check_regularise(config: Settings) -> None:
    given, coef = config.data.regularise, config.algorithm.data_coef
    if given is None:
        return
    sources(given, "data.regularise", weighted=False)
    if not coef:
        raise ConfigError(
            "data.regularise: the images have no weight in the loss, since algorithm.data_coef=0; set it, such as "
            "algorithm.data_coef=0.01, or leave data.regularise out"
        )
    if config.data.train_on == "files":
        raise ConfigError(f"data.regularise: it is for runs that draw, and with {FILES} none do; leave it out")
    if config.algorithm.subtracts_kl and config.algorithm.kl_coef > 0:
        raise ConfigError("data.regularise: with algorithm.kl_in_reward images of files would have to pay; use false")
    if config.trainer.staleness or config.lockstep or config.cluster.layout == "split":
        raise ConfigError(
            "data.regularise: images of files do not go together yet with trainer.staleness, cluster.layout=split, "
            "cluster.context and model.shard; leave these out"
        )
