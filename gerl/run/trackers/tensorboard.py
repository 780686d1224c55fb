"""TensorBoard's event files, written by this process: no server, and a full disk ends the run as for all its files."""

from pathlib import Path

import numpy as np
from PIL import Image

from gerl.run.trackers.base import TrackedRun
from gerl.utils.files import writing


class TensorBoard:
    """Event files in `tensorboard/`; those of the steps after `start_step`, which a resumed run repeats, are hidden."""

    def __init__(self, run: TrackedRun) -> None:
        # Here and not above: the import takes a second, and only this process needs it.
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
        """TensorBoard keeps no files."""

    def alert(self, step: int, sentence: str) -> None:
        self._text(step, "alerts", sentence)

    def close(self, failed: bool = False) -> None:
        self._writer.close()

    def _text(self, step: int, name: str, content: str) -> None:
        self._writer.add_text(name, "".join(f"    {line}\n" for line in content.splitlines()), step)  # Markdown of code
