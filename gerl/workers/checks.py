"""The checks of a run's model and optimizer before weights are loaded."""

from pathlib import Path

from gerl.cluster.gpus import start_device
from gerl.config import Config
from gerl.errors import ConfigError
from gerl.model.drawing_weights import check_drawing
from gerl.model.loading import check_model, precision
from gerl.model.quantisation import check_quantisation
from gerl.model.speed import check_attention
from gerl.model.teacher_pipelines import check_teachers
from gerl.utils.files import reason
from gerl.workers.optimizers import check_optimizer


def check_start(config: Config, device: str) -> None:
    """Raise `ModelError` or `ConfigError` if the model of `config` cannot be loaded or trained on `device`.

    A pipeline of the hub is fetched into its cache. Raises `ClusterError` if torch cannot compute on the device at all.
    """
    start_device(device)
    check_quantisation(config.model, device)
    if config.model.attention is not None:
        check_attention(config.model.attention, device, precision(config.model, device))
    if config.rollout.quantize != "none":
        check_drawing(config.rollout.quantize, device, precision(config.model, device))
    check_model(config.model, config.sampling, config.cluster.context)
    if taught_by := config.algorithm.taught_by:
        check_teachers(taught_by, config.model, config.sampling)
    check_optimizer(config.actor, device)
    if config.data.cache is not None:
        folder = Path(config.data.cache).expanduser()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"data.cache={config.data.cache}: {reason(error)}; give a folder, or use null") from None
