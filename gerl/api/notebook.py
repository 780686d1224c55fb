"""The progress of a run in a notebook: reward so far, and the newest pictures, in one output that is updated."""

from __future__ import annotations

import html
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from gerl.pages.images import to_data_uri

WIDTH, HEIGHT = 480, 90  # pixels of the curve
SHEET = 640  # pixels of the newest sheet


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook, which can show HTML."""
    if "IPython" not in sys.modules:
        return False
    from IPython import get_ipython

    shell = get_ipython()
    return shell is not None and hasattr(shell, "kernel")


class Board:
    """The output of a notebook while a run goes on."""

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
        """The HTML after `step`."""
        said = [f"step {step} of {self.total}"]
        said += [f"reward {self.rewards[-1][1]:.3f}"] if self.rewards else []
        said += [f"held-out {self.held_out[-1][1]:.3f}"] if self.held_out else []
        bar = f"<progress max='{self.total}' value='{step}' style='width:{WIDTH}px'></progress>"
        return f"<div>{bar}<div>{html.escape(', '.join(said))}</div>{self._curve()}{self._sheet()}</div>"

    def _curve(self) -> str:
        """Rewards over steps: a line for training, dots for held-out prompts."""
        points = self.rewards + self.held_out
        if len(points) < 2:
            return ""
        low, high = min(v for _, v in points), max(v for _, v in points)
        span = high - low or 1.0

        def place(point: tuple[int, float]) -> tuple[float, float]:
            return 4 + (WIDTH - 8) * point[0] / self.total, HEIGHT - 6 - (HEIGHT - 12) * (point[1] - low) / span

        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, self.rewards))
        label = f"reward over steps, {low:.3f} to {high:.3f}"
        dots = "".join(
            f"<circle cx='{x:.1f}' cy='{y:.1f}' r='3' fill='#d9480f'/>" for x, y in map(place, self.held_out)
        )
        return (
            f"<svg width='{WIDTH}' height='{HEIGHT}' role='img' aria-label='{label}'>"
            f"<polyline points='{line}' fill='none' stroke='#868e96'/>{dots}</svg>"
        )

    def _sheet(self) -> str:
        """The newest sheet of the run folder."""
        sheets = sorted((self.folder / "samples").glob("*.png"), key=lambda path: path.stat().st_mtime)
        if not sheets:
            return ""
        image = Image.open(sheets[-1]).convert("RGB")
        image.thumbnail((SHEET, 4 * SHEET))
        picture = Image.fromarray(np.asarray(image))
        return f"<img src='{to_data_uri(picture, lossy=True)}' alt='{html.escape(sheets[-1].stem)}'>"
