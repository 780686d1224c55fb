"""Send metrics, images, LoRAs and warnings to TensorBoard, W&B, MLflow, SwanLab or Trackio."""

import contextlib
import math
import sys
from pathlib import Path

from PIL import Image

from gerl.config import Config
from gerl.errors import GerlError
from gerl.run.trackers import Sink, open_sinks
from gerl.run.tracking import METRICS, tracked_run
from gerl.trainer.extensions import Extension
from gerl.trainer.run import Run
from gerl.trainer.step import Step
from gerl.utils.files import writing


class Trackers(Extension):
    """The trackers of `logger.trackers`; `metrics.jsonl` is written without them."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.sinks: list[Sink] = []

    def starting(self, run: Run) -> None:
        self.sinks = open_sinks(tracked_run(run.run_dir, self.config.logger, run.log_start), self.config.logger)

    def logged(self, run: Run, step: Step) -> None:
        finite = {name: float(value) for name, value in run.latest.items() if math.isfinite(value)}
        with writing(run.run_dir / METRICS):
            for sink in self.sinks:
                sink.log(step.number, finite)

    def pictured(self, run: Run, step: int, name: str, path: Path, image: Image.Image) -> None:
        with writing(path):
            for sink in self.sinks:
                sink.image(step, f"samples/{name}", path)

    def saved(self, run: Run, step: int, folder: Path) -> None:
        lora = folder / "lora"
        if not (self.sinks and lora.is_dir()):
            return
        files = {path.name: path.read_bytes() for path in lora.iterdir()}
        with writing(run.run_dir / METRICS):
            for sink in self.sinks:
                sink.lora(step, files)

    def alerted(self, run: Run, step: int, sentence: str) -> None:
        with writing(run.run_dir / METRICS):
            for sink in self.sinks:
                sink.alert(step, sentence)

    def returning(self, run: Run) -> None:
        self._close(run, failed=False)

    def ended(self, run: Run, error: BaseException | None) -> None:
        """Flush and close the trackers; while another error ends the run, errors of trackers are not raised."""
        self._close(run, failed=error is not None)

    def _close(self, run: Run, failed: bool) -> None:
        ending, sinks, self.sinks = sys.exception(), self.sinks, []
        try:
            with writing(run.run_dir / METRICS), contextlib.ExitStack() as stack:
                for sink in reversed(sinks):  # the first one is closed first
                    stack.callback(sink.close, failed=failed)
        except GerlError:
            if ending is None:
                raise
