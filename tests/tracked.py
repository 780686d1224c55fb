"""The log of metrics and the trackers of a run, without the run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from gerl.config import Config, LoggerConfig
from gerl.progress import Stopwatch
from gerl.trainer.extensions.trackers import Trackers
from gerl.trainer.history import History
from gerl.trainer.step import Step


class TrackedLog:
    """Writes what a run writes, and tells the trackers of `config` of it as a run does."""

    def __init__(self, run_dir: Path, config: LoggerConfig, start_step: int = 0) -> None:
        self.run_dir, self.history = run_dir, History(run_dir, 0.0)
        self.run: Any = self  # to the extension
        self.history.open_log(start_step)
        self.trackers = Trackers(Config(logger=config))
        self.trackers.starting(self.run)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.history.add_row(step, metrics)
        self.trackers.logged(self.run, Step(step, Stopwatch()))

    def image(self, step: int, name: str, image: Image.Image) -> Path:
        path = self.history.picture(step, name, image)
        self.trackers.pictured(self.run, step, name, path, image)
        return path

    def checkpoint(self, step: int, files: Mapping[str, bytes]) -> None:
        folder = self.run_dir / "checkpoints" / f"step_{step}"
        for name, content in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        self.trackers.saved(self.run, step, folder)

    def alert(self, step: int, sentence: str) -> None:
        self.trackers.alerted(self.run, step, sentence)

    def close(self, error: BaseException | None = None) -> None:
        self.trackers.ended(self.run, error)
        self.history.log.close()
