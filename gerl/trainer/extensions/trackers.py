"""Send metrics, images, LoRAs and warnings to TensorBoard, W&B, MLflow, SwanLab or Trackio."""

import contextlib
import logging
import math
import sys
from pathlib import Path

import numpy as np
from PIL import Image

from gerl.config import Config, LoggerConfig
from gerl.errors import GerlError
from gerl.run.card import redact, redacted
from gerl.run.settings import get, read_config
from gerl.run.trackers import RECORD, REMOTE, Record, Sink, TrackedRun, TrackerProcess, check_trackers, is_installed
from gerl.run.tracking import METRICS
from gerl.trainer.run import Extension, Run
from gerl.trainer.step import Step
from gerl.utils.files import writing

logger = logging.getLogger(__name__)


class Trackers(Extension):
    """The trackers of `logger.trackers`; `metrics.jsonl` is written without them."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.sinks: list[Sink] = []

    def starting(self, run: Run) -> None:
        self.sinks = open_sinks(tracked_run(run.run_dir, self.config.logger, run.history.log_start), self.config.logger)

    def logged(self, run: Run, step: Step) -> None:
        finite = {name: float(value) for name, value in run.history.latest.items() if math.isfinite(value)}
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


def tracked_run(run_dir: Path, config: LoggerConfig, start_step: int) -> TrackedRun:
    """Describe the run to trackers: named after the last two folders of its path, with its `config.yaml`."""
    with writing(run_dir):
        text, values = read_config(run_dir / "config.yaml")
    settings = redacted(values)
    preset = settings.get("preset") or get(settings, "algorithm", "name")
    tags = [str(preset)] if preset else []
    name = "-".join(part for part in run_dir.parts[-2:] if part != run_dir.anchor)
    return TrackedRun(
        folder=run_dir,
        name=name or run_dir.resolve().name,
        project=config.project,
        tags=list(dict.fromkeys([*tags, *config.tags])),
        config=settings,
        text=redact(text),
        start_step=start_step,
    )


def open_sinks(run: TrackedRun, config: LoggerConfig) -> list[Sink]:
    """Open the configured trackers; they resume the runs recorded in `trackers.json`. Warns without TensorBoard."""
    check_trackers(config)
    record, sinks = Record(run.folder / RECORD), list[Sink]()
    for name in config.used_trackers:
        if name in REMOTE:
            sinks.append(TrackerProcess(name, record.for_resume(name, run), record.keeper(name)))
        elif is_installed(name):
            sinks.append(TensorBoard(run))
        else:
            logger.warning(
                "tensorboard is not installed: the run is without its files; pip install tensorboard, or use "
                "logger.tensorboard=false"
            )
    return sinks


# --- TensorBoard's event files, written by this process: a full disk ends the run, as for its other files


class TensorBoard:
    """Event files in `tensorboard/`; steps after `start_step`, which a resumed run repeats, are hidden."""

    def __init__(self, run: TrackedRun) -> None:
        # imported here: it takes a second, and only this process needs it
        from torch.utils.tensorboard import SummaryWriter

        folder, start = run.folder / "tensorboard", run.start_step
        with writing(folder):
            self._writer = SummaryWriter(str(folder), purge_step=start + 1 if start else None, flush_secs=10)
        if run.text:
            self._text(max(start, 0), "config.yaml", run.text)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def image(self, step: int, name: str, path: Path) -> None:
        with Image.open(path) as picture:
            self._writer.add_image(name, np.asarray(picture.convert("RGB")), step, dataformats="HWC")

    def lora(self, step: int, files: dict[str, bytes]) -> None:
        """Do nothing: TensorBoard stores no files."""

    def alert(self, step: int, sentence: str) -> None:
        self._text(step, "alerts", sentence)

    def close(self, failed: bool = False) -> None:
        self._writer.close()

    def _text(self, step: int, name: str, content: str) -> None:
        self._writer.add_text(name, "".join(f"    {line}\n" for line in content.splitlines()), step)  # code in Markdown
