"""Save training images with their rewards: sheets in `samples/`, and those of the latest steps in `live/`."""

import contextlib
import io
import json
import logging
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from gerl.config import Config
from gerl.errors import GerlError
from gerl.protocol import Group
from gerl.run.live import FOLDER
from gerl.trainer.plan import due
from gerl.trainer.run import Extension, Run
from gerl.trainer.step import Step
from gerl.trainer.validation import training_sheet
from gerl.utils.files import finite, write_file, writing
from gerl.utils.pages import still

logger = logging.getLogger(__name__)
WIDTH = 256  # pixels, the longer side of an image on the sheet
EXACT = 128  # pixels; smaller images are stored almost losslessly (PNG would take ten times as long)
KEPT = 2  # latest steps
MILESTONES = 24  # earlier steps, evenly spaced
MAX_IMAGES = 64  # images


class TrainingImages(Extension):
    """Save a sheet of the first micro-batch at each validation step, and the live images of every step."""

    failed = False  # to write images for the page, which is logged once

    @classmethod
    def wanted(cls, config: Config) -> bool:
        return not config.episode.turns  # whose images belong together: `gerl.trainer.extensions.episode_images`

    def starting(self, run: Run) -> None:
        if not self.config.logger.live:
            remove_live(run.run_dir)

    def credited(self, run: Run, step: Step) -> None:
        if step.number == 1 or due(step.number, run.config.validation.every, run.plan.last_step):
            first = len(step.tasks[0].samples)
            sheet = training_sheet(step.scores.samples[:first], step.images[0].result().pixels, step.scores.totals)
            run.picture(step.number, "train", sheet)
        if self.config.logger.live:
            with self.saving():
                self.save_live(run, step)

    def save_live(self, run: Run, step: Step) -> None:
        """Save the live images of a step."""
        save_live_images(run, step)

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Log the first failure to write images for the page; the run continues."""
        try:
            yield
        except GerlError as error:
            if not self.failed:
                logger.warning("the page of the run is incomplete: %s", error)
            self.failed = True


def save_live_images(run: Run, step: Step) -> None:
    """Save the first images of a step with their scores and advantages (mean over the trained timesteps)."""
    assert step.credit is not None
    scores, pixels = step.scores, list[np.ndarray]()
    for images in step.images:
        part = list(images.result().pixels)
        pixels += part[: MAX_IMAGES - len(pixels)]
        if len(pixels) == MAX_IMAGES or part[0].ndim == 4:  # videos are large: those of one micro-batch are enough
            break
    groups: dict[Group, int] = {}
    prompts, shown = list[str](), list[LiveImage]()
    for i, sample in enumerate(scores.samples[: len(pixels)]):
        if sample.group not in groups:
            groups[sample.group] = len(groups)
            prompts.append(sample.prompt.text)
        by_scorer = {name: values[i] for name, values in scores.by_scorer.items()}
        advantage = mean_advantage(step.credit[i])
        shown.append(LiveImage(groups[sample.group], sample.index, scores.totals[i], by_scorer, advantage))
    save_live(run.run_dir, step.number, prompts, shown, pixels[: len(shown)], len(scores.samples))


def mean_advantage(credit: torch.Tensor) -> float | None:
    """Return the mean of the credit of a sample `[T]` over its trained timesteps; None if it is not trained."""
    trained = credit[~torch.isnan(credit)]
    return float(trained.mean()) if len(trained) else None


# --- `live/`: one sheet for each of the latest and some earlier steps, and its scores


@dataclass(frozen=True)
class LiveImage:
    """Image `index` of group `group` of a step, with its scores; None: not scored."""

    group: int
    index: int
    total: float | None
    scores: dict[str, float | None]
    advantage: float | None  # mean over the trained timesteps


def save_live(
    run_dir: Path, step: int, prompts: Sequence[str], images: Sequence[LiveImage], pixels: Sequence[np.ndarray], of: int
) -> None:
    """Write `live/step_N.json` and its sheet of `pixels`, a prompt per group; remove later and most earlier ones."""
    shown = [[i.group, i.index, i.total, i.advantage, i.scores] for i in images]
    path = live_path(run_dir, step)
    save_sheet(path, pixels, {"step": step, "of": of, "prompts": list(prompts), "images": shown})
    thin(path.parent, step)


def live_path(run_dir: Path, step: int) -> Path:
    """Return the JSON file of the live images of a step."""
    return run_dir / FOLDER / f"step_{step:06d}.json"


def save_sheet(path: Path, pixels: Sequence[np.ndarray], values: Mapping[str, Any]) -> None:
    """Write a sheet of `pixels` beside the JSON file `path`, which has `values` and the layout of the sheet."""
    tiles = [_small(still(image) if image.ndim == 4 else image) for image in pixels]
    width, height = max(tile.width for tile in tiles), max(tile.height for tile in tiles)
    columns = min(len(tiles), math.ceil(math.sqrt(len(tiles) * height / width)))
    sheet = Image.new("RGB", (columns * width, math.ceil(len(tiles) / columns) * height))
    for i, tile in enumerate(tiles):
        sheet.paste(tile, (i % columns * width, i // columns * height))
    buffer, exact = io.BytesIO(), max(width, height) <= EXACT
    sheet.save(buffer, "jpeg", quality=95 if exact else 85, subsampling=0 if exact else 2)
    with writing(path):
        path.parent.mkdir(exist_ok=True)
    # the JSON is written last: if it exists, the sheet is complete
    write_file(path.with_suffix(".jpg"), buffer.getvalue())
    write_file(path, json.dumps(finite({**values, "width": width, "height": height, "columns": columns})))


def thin(folder: Path, newest: int) -> None:
    """Keep the last `KEPT` steps and at most `MILESTONES` earlier ones; later ones precede a rollback or resume."""
    steps = sorted([int(path.stem.removeprefix("step_")) for path in folder.glob("step_*.json")])
    earlier, spacing = [step for step in steps if step <= newest][:-KEPT], 1
    while newest // spacing > MILESTONES:
        spacing *= 2
    for step in [step for step in steps if step > newest] + [step for step in earlier if step % spacing]:
        for kind in ("json", "jpg"):
            with contextlib.suppress(OSError):
                (folder / f"step_{step:06d}.{kind}").unlink(missing_ok=True)


def remove_live(run_dir: Path) -> None:
    """Remove the images of all steps."""
    shutil.rmtree(run_dir / FOLDER, ignore_errors=True)


def _small(image: np.ndarray) -> Image.Image:
    picture = Image.fromarray(np.ascontiguousarray(image))
    picture.thumbnail((WIDTH, WIDTH), Image.Resampling.BILINEAR, reducing_gap=2.0)
    return picture
