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
    """Raise `ConfigError` if the package of a tracker is not installed; none is imported."""
    for name in config.used_trackers:
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:  # a folder of that name, such as wandb's own, is not a package
            install = f"'gerl[{name}]'" if name in REMOTE else name
            raise ConfigError(
                f"logger.trackers=[{', '.join(config.trackers)}]: the package {name} is not installed; pip install "
                f"{install}, or remove {name}"
            )
