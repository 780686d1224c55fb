"""A run as an object, its progress in a notebook, and images in memory as files."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image

from gerl.config.bounded_text import read_values
from gerl.data.code import as_lines, row_of
from gerl.errors import DataError, GerlError
from gerl.model.paths import WEIGHTS
from gerl.run.choice import find_checkpoint
from gerl.run.report import write_report
from gerl.run.tracking import read_metrics
from gerl.run.validation import load_validation, validation_steps
from gerl.utils.files import reason, write_file
from gerl.utils.pages import grid, render, thumbnail, to_data_uri

WIDTH = 192  # pixels of an image in a notebook


@dataclass(frozen=True)
class Picture:
    """A held-out image of a run."""

    image: Image.Image
    prompt: str
    reward: float | None  # None: not scored

    def _repr_png_(self) -> bytes | None:
        return self.image._repr_png_()


@dataclass(frozen=True)
class Run:
    """A run in its `folder`, also while it is running."""

    folder: Path

    def __init__(self, folder: str | Path) -> None:
        """Raises `GerlError` if there is no run in `folder`."""
        object.__setattr__(self, "folder", Path(folder).expanduser())
        if not (self.folder / "config.yaml").is_file():
            raise GerlError(
                f"{folder} is not a run folder: there is no config.yaml; give the folder that the run printed"
            )

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Rows of `metrics.jsonl`, one per trainer step; `pandas.DataFrame(run.metrics)` is a table."""
        return read_metrics(self.folder / "metrics.jsonl")

    def column(self, name: str) -> list[float]:
        """Return the values of a metric, of the steps that have it."""
        return [row[name] for row in self.metrics if row.get(name) is not None]

    @property
    def config(self) -> dict[str, Any]:
        """The configuration as nested dictionaries."""
        file = self.folder / "config.yaml"
        try:
            values = read_values(file)
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise GerlError(f"{file} cannot be read ({reason(error)}): restore it") from None
        if not isinstance(values, dict):
            raise GerlError(f"{file} is not the configuration of a run: restore it")
        return values

    @property
    def lora(self) -> Path:
        """Folder of the trained LoRA, for `pipe.load_lora_weights`.

        From the best checkpoint (`checkpoint.best`) without signals of the guard; without validations the newest.
        Raises `FlaggedError` if every validated one has signals, `CheckpointError` if there is none.
        """
        checkpoint = find_checkpoint(self.folder)[1]
        if not (checkpoint.path / "lora" / WEIGHTS).is_file():
            raise GerlError(f"{checkpoint.path} has no LoRA: the run used full fine-tuning, its weights are there")
        return checkpoint.path / "lora"

    @property
    def validated(self) -> list[int]:
        """Trainer steps with a validation."""
        return sorted(validation_steps(self.folder))

    def images(self, step: int | None = None) -> list[Picture]:
        """Return the held-out images of the validation after `step`, by default the last one.

        Raises `GerlError` if there is no such validation, or if its images are no longer kept.
        """
        steps = self.validated
        if not steps or (step is not None and step not in steps):
            others = f", only after steps {', '.join(map(str, steps))}" if steps else " so far"
            raise GerlError(f"{self.folder} has no validation{'' if step is None else f' after step {step}'}{others}")
        validation = load_validation(self.folder, steps[-1] if step is None else step)
        if not validation.shown:
            raise GerlError(
                f"the images of step {validation.step} are no longer kept (validation.keep), only its rewards"
            )
        return [
            Picture(Image.fromarray(pixels), validation.prompts[i], validation.rewards[i])
            for i, pixels in zip(validation.shown, validation.pixels, strict=True)
        ]

    @property
    def report(self) -> Path:
        """Write `report.html`; returns its path."""
        return write_report(self.folder)

    def show(self, step: int | None = None, most: int = 32) -> Image.Image:
        """Return a sheet of the held-out images after `step`, with reward and prompt under each."""
        pictures = self.images(step)[:most]
        captions = [f"{'-' if p.reward is None else f'{p.reward:.2f}'} {p.prompt}" for p in pictures]
        return grid([_pixels(p.image) for p in pictures], captions, columns=4)

    @cached_property
    def name(self) -> str:
        """Last two parts of the folder."""
        return "/".join(self.folder.parts[-2:])

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"

    def _repr_html_(self) -> str:
        rows = [row for row in self.metrics if row.get("val/reward/mean") is not None]
        shown = {}
        for step in dict.fromkeys(self.validated[:1] + self.validated[-1:]):
            pictures = self.images(step)[:8]
            shown[step] = [(thumbnail(_pixels(picture.image), WIDTH, WIDTH), picture) for picture in pictures]
        return render("notebook.html.j2", name=self.name, rows=rows, shown=shown, width=WIDTH)


def _pixels(image: Image.Image) -> np.ndarray:
    return np.asarray(image.convert("RGB"))


# --- The progress of a run in a notebook: reward curve and newest images in one updated output

CURVE_WIDTH, CURVE_HEIGHT = 480, 90  # pixels of the curve
SHEET = 640  # pixels of the newest sheet


def in_notebook() -> bool:
    """Whether this process is a notebook kernel, which can show HTML."""
    if "IPython" not in sys.modules:
        return False
    from IPython import get_ipython

    shell = get_ipython()
    return shell is not None and hasattr(shell, "kernel")


class Board:
    """Notebook output of a running run."""

    def __init__(self, total: int, folder: Path) -> None:
        self.total, self.folder = total, folder
        self.rewards: list[tuple[int, float]] = []
        self.held_out: list[tuple[int, float]] = []
        self.handle: Any = None

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the state after `step`."""
        for name, points in (("reward/mean", self.rewards), ("val/reward/mean", self.held_out)):
            if (value := metrics.get(name)) is not None:
                points.append((step, value))
        from IPython.display import HTML, display

        page = HTML(self.page(step))
        if self.handle is None:
            self.handle = display(page, display_id=True)
        else:
            self.handle.update(page)

    def page(self, step: int) -> str:
        """Return the HTML after `step`: progress, a line for training, dots for held-out prompts, the newest sheet."""
        points = self.rewards + self.held_out
        low, high = (end((reward for _, reward in points), default=0.0) for end in (min, max))
        across, up = (CURVE_WIDTH - 8) / self.total, (CURVE_HEIGHT - 12) / (high - low or 1.0)
        places = {
            name: [(4 + across * number, CURVE_HEIGHT - 6 - up * (reward - low)) for number, reward in series]
            for name, series in (("line", self.rewards), ("dots", self.held_out))
        }
        sheets = sorted((self.folder / "samples").glob("*.png"), key=lambda path: path.stat().st_mtime)
        shown: dict[str, Any] = {"sheet": None, "board": self, "step": step, "low": low, "high": high}
        shown |= {"width": CURVE_WIDTH, "height": CURVE_HEIGHT}
        if sheets:
            image = Image.open(sheets[-1]).convert("RGB")
            image.thumbnail((SHEET, 4 * SHEET))
            shown["sheet"] = to_data_uri(image, lossy=True), sheets[-1].stem
        return render("board.html.j2", **shown, **places)


# --- Images to be scored: files, PIL images, arrays and tensors

Rows = str | Path | Sequence[str | Mapping[str, Any]] | None
CHANNELS = (1, 3, 4)
FORMS = (
    "expected the path of a file, a PIL image, or an array or tensor [H, W, 3] or [3, H, W] of bytes or of floats "
    "from 0 to 1"
)


def listed(images: Any, prompts: Rows, here: Path) -> Path:
    """Write a file of images and prompts for `gerl.score` into the folder `here`, with images in memory beside it.

    images: one, several, or the output of a pipeline. Raises `DataError` for anything else, and for prompts that do not
    match the images.
    """
    images = getattr(images, "images", images)
    if isinstance(images, Image.Image) or (hasattr(images, "shape") and len(images.shape) in (2, 3)):
        images = [images]
    if not isinstance(images, Iterable):
        raise DataError(f"images are {type(images).__name__}: {FORMS}, or a list of these")
    pictures = list(images)
    if prompts is None:
        raise DataError("prompts are missing: give one per image, or one for all")
    rows = [prompts] * len(pictures) if isinstance(prompts, str | Path | Mapping) else list(prompts)
    if len(rows) != len(pictures):
        raise DataError(f"{len(rows)} prompts for {len(pictures)} images: give one per image, or one for all")
    columns = [row_of(str(row) if isinstance(row, Path) else row, i) for i, row in enumerate(rows)]
    files = [str(_file(image, i, here)) for i, image in enumerate(pictures)]
    write_rows(here / "images.jsonl", [{**row, "image": file} for row, file in zip(columns, files, strict=True)])
    return here / "images.jsonl"


def write_rows(file: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows to a .jsonl file; raises `DataError` for values that JSON does not have."""
    write_file(file, "".join(f"{line}\n" for line in as_lines(rows)))


def _file(image: object, i: int, here: Path) -> Path:
    if isinstance(image, str | Path):
        return Path(image).expanduser().absolute()
    if not isinstance(image, Image.Image):
        image = _of_numbers(image, i)
    if image.mode[0] in "IF":
        raise DataError(f"image {i} has more than 8 bits per channel (mode {image.mode}): convert it to 8")
    path = here / f"{i}.png"
    image.convert("RGBA" if image.has_transparency_data else "RGB").save(path)
    return path


def _of_numbers(image: Any, i: int) -> Image.Image:
    try:  # on a GPU, in half precision, or with a gradient
        values = np.asarray(image.detach().cpu().float() if hasattr(image, "detach") else image)
        whole = not (image.is_floating_point() if hasattr(image, "detach") else values.dtype.kind == "f")
    except (TypeError, ValueError, RuntimeError):
        values = np.empty(0, object)
    if values.dtype.kind not in "uif":
        raise DataError(f"image {i} is {type(image).__name__}: {FORMS}")
    if values.ndim == 3 and values.shape[0] in CHANNELS and values.shape[2] not in CHANNELS:
        values = values.transpose(1, 2, 0)
    if not (values.ndim == 2 or (values.ndim == 3 and values.shape[2] in CHANNELS)) or 0 in values.shape:
        raise DataError(f"image {i} has the shape {list(values.shape)}: {FORMS}")
    low, high = float(values.min()), float(values.max())
    if not 0 <= low <= high <= (255 if whole else 1):  # also false for NaN
        raise DataError(f"image {i} has values from {low:g} to {high:g}: {FORMS}")
    pixels = (values if whole else (values * 255).round()).astype(np.uint8)
    return Image.fromarray(pixels[:, :, 0] if pixels.ndim == 3 and pixels.shape[2] == 1 else pixels)
