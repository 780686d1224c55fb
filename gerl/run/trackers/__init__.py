"""Trackers: TensorBoard in this process, the others in a process of their own each.

So a package cannot cost a run a step, even if it hangs, blocks at exit, prompts for a password or catches signals. To
add a tracker, write a class like `Wandb` and list it in `REMOTE`.
"""

import importlib.util

from gerl.config import LoggerConfig
from gerl.errors import ConfigError
from gerl.run.trackers.backends import Mlflow, Swanlab, TensorBoard, Trackio, Wandb
from gerl.run.trackers.process import Record, Remote, Sink, TrackedRun, TrackerProcess

__all__ = ["REMOTE", "Sink", "TrackedRun", "check_trackers", "open_sinks"]

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


def open_sinks(run: TrackedRun, config: LoggerConfig) -> list[Sink]:
    """Open the configured trackers; they resume the runs recorded in `trackers.json`."""
    check_trackers(config)
    record = Record(run.folder / RECORD)
    return [
        TensorBoard(run)
        if name == "tensorboard"
        else TrackerProcess(name, record.for_resume(name, run), record.keeper(name))
        for name in config.used_trackers
    ]
