"""A run as an object: its metrics, pictures and LoRA, read from its folder."""

from __future__ import annotations

import html
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image

from gerl.errors import GerlError
from gerl.model.paths import WEIGHTS
from gerl.pages.images import grid, thumbnail
from gerl.run.checkpoint import find_checkpoint
from gerl.run.report import write_report
from gerl.run.tracking import read_metrics
from gerl.run.validation import load_validation, validation_steps

WIDTH = 192  # pixels of a picture in a notebook


@dataclass(frozen=True)
class Picture:
    """A held-out picture of a run."""

    image: Image.Image
    prompt: str
    reward: float | None  # None: not scored

    def _repr_png_(self) -> bytes | None:
        return self.image._repr_png_()


@dataclass(frozen=True)
class Run:
    """A run in its `folder`; what it has so far, also while it goes on."""

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
        """A row for each trainer step, the keys as in `metrics.jsonl`; `pandas.DataFrame(run.metrics)` is a table."""
        return read_metrics(self.folder / "metrics.jsonl")

    def column(self, name: str) -> list[float]:
        """The values of one metric, of the steps that have it."""
        return [row[name] for row in self.metrics if row.get(name) is not None]

    @property
    def config(self) -> dict[str, Any]:
        """The configuration, block by block."""
        found: dict[str, Any] = yaml.safe_load((self.folder / "config.yaml").read_text(encoding="utf-8"))
        return found

    @property
    def lora(self) -> Path:
        """The folder of the trained LoRA, for `pipe.load_lora_weights`.

        It is that of the checkpoint with the best held-out reward, else of the newest. Raises `CheckpointError` if
        there is none yet.
        """
        checkpoint = find_checkpoint(self.folder)[1]
        if not (checkpoint.path / "lora" / WEIGHTS).is_file():
            raise GerlError(f"{checkpoint.path} has no LoRA: the run used full fine-tuning, its weights are there")
        return checkpoint.path / "lora"

    @property
    def validated(self) -> list[int]:
        """The trainer steps after which held-out prompts were drawn."""
        return sorted(validation_steps(self.folder))

    def images(self, step: int | None = None) -> list[Picture]:
        """The held-out pictures of the validation after `step`, by default the last one.

        Raises `GerlError` if there is no such validation, or if its pictures are no longer kept.
        """
        steps = self.validated
        if not steps or (step is not None and step not in steps):
            known = f", only after steps {', '.join(map(str, steps))}" if steps else " so far"
            raise GerlError(f"{self.folder} has no validation{'' if step is None else f' after step {step}'}{known}")
        found = load_validation(self.folder, steps[-1] if step is None else step)
        if not found.shown:
            raise GerlError(f"the images of step {found.step} are no longer kept (validation.keep), only its rewards")
        return [
            Picture(Image.fromarray(pixels), found.prompts[i], found.rewards[i])
            for i, pixels in zip(found.shown, found.pixels, strict=True)
        ]

    @property
    def report(self) -> Path:
        """`report.html`, written anew."""
        return write_report(self.folder)

    def show(self, step: int | None = None, most: int = 32) -> Image.Image:
        """A sheet of the held-out pictures after `step`, with reward and prompt under each."""
        pictures = self.images(step)[:most]
        captions = [f"{'-' if p.reward is None else f'{p.reward:.2f}'} {p.prompt}" for p in pictures]
        return grid([_pixels(p.image) for p in pictures], captions, columns=4)

    @cached_property
    def name(self) -> str:
        """The last two parts of the folder."""
        return "/".join(self.folder.parts[-2:])

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"

    def _repr_html_(self) -> str:
        """Rewards, and the same held-out prompts before and after, for a notebook."""
        rows = [row for row in self.metrics if row.get("val/reward/mean") is not None]
        said = (
            ", ".join(f"{row['val/reward/mean']:.3f} after step {row['step']}" for row in rows) or "no validation yet"
        )
        lines = [f"<b>{html.escape(self.name)}</b>: held-out reward {said}"]
        steps = self.validated
        for step in dict.fromkeys(steps[:1] + steps[-1:]):
            cells = [_cell(picture) for picture in self.images(step)[:8]]
            row = f"<div style='display:flex;flex-wrap:wrap;gap:8px'>{''.join(cells)}</div>"
            lines.append(f"<div>after step {step}</div>{row}")
        return "".join(f"<div>{line}</div>" for line in lines)


def _pixels(image: Image.Image) -> np.ndarray:
    return np.asarray(image.convert("RGB"))


def _cell(picture: Picture) -> str:
    uri = thumbnail(_pixels(picture.image), width=WIDTH, exact=WIDTH)
    reward = "not scored" if picture.reward is None else f"{picture.reward:.2f}"
    return (
        f"<figure style='margin:0;max-width:{WIDTH}px'><img src='{uri}' style='width:100%'>"
        f"<figcaption style='font-size:11px'>{reward} {html.escape(picture.prompt)}</figcaption></figure>"
    )
