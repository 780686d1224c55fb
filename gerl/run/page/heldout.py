"""The held-out prompts of a run through all of its validations."""

import io
import json
import math
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np

from gerl.errors import GerlError
from gerl.pages.images import enlarge
from gerl.run.page.files import signature
from gerl.run.validation import load_validation, mean, standard_error, validation_steps

STEPS = 100  # validations that are shown; of more, some are left out evenly
DECODED, ENCODED = 4, 512  # validations whose pictures, and pictures whose bytes, are kept
WIDE, EXACT = 512, 256  # pixels: wider pictures are made smaller; up to this they are kept as they are


class HeldOut:
    """Reads each validation once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.steps: list[int] = []
        self.prompts: list[str] = []
        self._known: dict[int, tuple[str, dict[str, Any] | None]] = {}
        self._common: dict[str, Any] = {}  # of the validation that was read last
        self._decoded: OrderedDict[tuple[int, str], dict[int, np.ndarray]] = OrderedDict()
        self._encoded: OrderedDict[tuple[int, int, str], tuple[bytes, str]] = OrderedDict()

    def now(self) -> object:
        """Changes when a validation comes or goes."""
        return signature(self.folder / "validation")

    def read(self) -> dict[str, Any]:
        """`prompts` `[N]` of the newest validation, `steps` `[S]` that have the same ones, and what they scored."""
        found = {step: row for step in validation_steps(self.folder) if (row := self._row(step)) is not None}
        self.prompts = found[max(found)]["prompts"] if found else []
        steps = [step for step, row in found.items() if row["prompts"] == self.prompts]
        if len(steps) > STEPS:
            steps = [steps[round(i * (len(steps) - 1) / (STEPS - 1))] for i in range(STEPS)]
        self.steps = steps
        rows = [found[step] for step in steps]
        shown = set(rows[0]["shown"]).intersection(*(row["shown"] for row in rows)) if rows else set()
        errors = [standard_error(_by_prompt(row)) for row in rows]
        return {
            "prompts": self.prompts,
            "ids": rows[-1].get("ids") if rows else None,
            "steps": steps,
            "shown": sorted(shown),
            "rewards": [[_short(value) for value in row["rewards"]] for row in rows],
            "errors": [_short(error) for error in errors],
        }

    def scores(self, row: int) -> dict[str, Any] | None:
        """The scores of a prompt at all `steps`, by scorer."""
        if not 0 <= row < len(self.prompts):
            return None
        rows = [self._row(step) or {} for step in self.steps]
        names = dict.fromkeys(name for each in rows for name in each.get("by_scorer", {}))
        scores = {
            name: [_short(each.get("by_scorer", {}).get(name, {row: None})[row]) for each in rows] for name in names
        }
        return {"prompt": self.prompts[row], "steps": self.steps, "scores": scores}

    def picture(self, step: int, row: int) -> tuple[bytes, str] | None:
        """The picture of a prompt after a step, as bytes and their media type; None if there is none."""
        now = signature(self._path(step))
        key = (step, row, now)
        if key not in self._encoded:
            pixels = self._pixels(step, now).get(row)
            if pixels is None:
                return None
            self._encoded[key] = encoded(pixels)
        self._encoded.move_to_end(key)
        while len(self._encoded) > ENCODED:
            self._encoded.popitem(last=False)
        return self._encoded[key]

    def _pixels(self, step: int, now: str) -> dict[int, np.ndarray]:
        if (step, now) not in self._decoded:
            try:
                validation = load_validation(self.folder, step)
            except GerlError:
                return {}
            self._decoded[step, now] = dict(zip(validation.shown, validation.pixels, strict=True))
        self._decoded.move_to_end((step, now))
        while len(self._decoded) > DECODED:
            self._decoded.popitem(last=False)
        return self._decoded[step, now]

    def _row(self, step: int) -> dict[str, Any] | None:
        path = self._path(step)
        now = signature(path)
        if step not in self._known or self._known[step][0] != now:
            self._known[step] = now, self._slim(_checked(path))
        return self._known[step][1]

    def _slim(self, row: dict[str, Any] | None) -> dict[str, Any] | None:
        """A validation without what no page shows; what it has in common with the one before it is kept once."""
        if row is None:
            return None
        kept = {name: row.get(name) for name in ("rewards", "by_scorer", "shown", "prompts", "ids")}
        for name in ("prompts", "ids", "shown"):
            kept[name] = self._common[name] if self._common.get(name) == kept[name] else kept[name]
        self._common = {name: kept[name] for name in ("prompts", "ids", "shown")}
        return kept

    def _path(self, step: int) -> Path:
        return self.folder / "validation" / f"step_{step:06d}.json"


def encoded(pixels: np.ndarray) -> tuple[bytes, str]:
    """A picture at a width for a page, small ones without loss."""
    image = enlarge(pixels, min_width=1, max_width=WIDE)
    buffer, lossy = io.BytesIO(), image.width > EXACT
    image.save(buffer, "jpeg" if lossy else "png", **({"quality": 88} if lossy else {"compress_level": 4}))
    return buffer.getvalue(), "image/jpeg" if lossy else "image/png"


def _checked(path: Path) -> dict[str, Any] | None:
    """The values of a validation without pictures; None where it is damaged."""
    try:
        row = json.loads(path.read_bytes())
        columns = [row["rewards"], *row["by_scorer"].values()]
        whole = all(len(column) == len(row["prompts"]) for column in columns)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return row if whole and isinstance(row.get("shown"), list) else None


def _short(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.4g}")


def _by_prompt(row: dict[str, Any]) -> list[float | None]:
    """The rewards of a validation, with the mean where a prompt has several images."""
    ids = row.get("ids")
    if not isinstance(ids, list) or len(ids) != len(row["rewards"]):
        return list(row["rewards"])
    groups: dict[Any, list[float | None]] = {}
    for prompt, value in zip(ids, row["rewards"], strict=True):
        groups.setdefault(prompt, []).append(value)
    return [mean(values) for values in groups.values()]
