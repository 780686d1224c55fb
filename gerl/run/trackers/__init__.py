"""Trackers of other packages, in a process of their own each (TensorBoard: `gerl.trainer.extensions.trackers`).

So a package cannot cost a run a step, even if it hangs, blocks at exit, prompts for a password or catches signals. To
add a tracker, write a class like `Wandb` and list it in `REMOTE`.
"""

import importlib.util

from gerl.config import LoggerConfig
from gerl.errors import ConfigError
from gerl.run.trackers.backends import Mlflow, Swanlab, Trackio, Wandb
from gerl.run.trackers.process import Record, Remote, Sink, TrackedRun, TrackerProcess

__all__ = ["RECORD", "REMOTE", "Record", "Sink", "TrackedRun", "TrackerProcess", "check_trackers"]

RECORD = "trackers.json"  # in the run folder: tracker -> its run
REMOTE: dict[str, type[Remote]] = {"wandb": Wandb, "trackio": Trackio, "mlflow": Mlflow, "swanlab": Swanlab}


def check_trackers(config: LoggerConfig) -> None:
    """Raise `ConfigError` if the package of a tracker is not installed, unless it is the default; none is imported."""
    for name in config.used_trackers:
        if name in REMOTE and not is_installed(name):
            raise ConfigError(
                f"logger.trackers=[{', '.join(config.trackers)}]: the package {name} is not installed; pip install "
                f"'gerl[{name}]', or remove {name}"
            )


def is_installed(package: str) -> bool:
    """Whether a package can be imported, without importing it."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None  # a folder of that name, such as wandb's own, is no package
