"""Trackers of a run besides `metrics.jsonl`: TensorBoard in this process, the others in a process of their own each.

A package of somebody else then costs a run no step, whatever it does: it may hang, block at exit, ask for a password or
catch signals. A new one is a class like `Wandb`, in `REMOTE`.
"""

import importlib.util

from gerl.config import LoggerConfig
from gerl.errors import ConfigError
from gerl.run.trackers.backends import Mlflow, Swanlab, TensorBoard, Trackio, Wandb
from gerl.run.trackers.process import Record, Remote, Sink, TrackedRun, TrackerProcess

__all__ = ["REMOTE", "Sink", "TrackedRun", "check_trackers", "open_sinks"]

RECORD = "trackers.json"  # of the run folder: by tracker, which of its runs this one is
REMOTE: dict[str, type[Remote]] = {"wandb": Wandb, "trackio": Trackio, "mlflow": Mlflow, "swanlab": Swanlab}


def check_trackers(config: LoggerConfig) -> None:
    """Raise `ConfigError` if the package of a tracker is not installed; none is imported."""
    for name in config.used_trackers:
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:  # a folder of that name, such as the one wandb writes, is no package
            install = f"'gerl[{name}]'" if name in REMOTE else name
            raise ConfigError(
                f"logger.trackers=[{', '.join(config.trackers)}]: the package {name} is not installed; pip install "
                f"{install}, or remove {name}"
            )


def open_sinks(run: TrackedRun, config: LoggerConfig) -> list[Sink]:
    """The trackers that the configuration asks for, which go on with the runs that `trackers.json` names."""
    check_trackers(config)
    record = Record(run.folder / RECORD)
    sinks: list[Sink] = []
    for name in config.used_trackers:
        if name == "tensorboard":
            sinks.append(TensorBoard(run))
        else:
            sinks.append(TrackerProcess(name, record.for_resume(name, run), record.keeper(name)))
    return sinks
