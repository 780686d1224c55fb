"""Scored images as files: `scores.csv`, `scores.jsonl`, and `gallery.html`, best first and sortable by any column."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gerl.pages.page import Card, Line, Picture, card_page, show
from gerl.rewards.total import TOTAL, distinct_columns
from gerl.utils.files import csv_text, write_file

BINS = 24
COLUMNS = ("image", "prompt", TOTAL, "failure")  # of the tables, beside those of the scorers
HEAD = ("column", "weight", "images", "mean", "std", "min", "median", "max", "min to max")


@dataclass(frozen=True)
class ScoredImage:
    """An image: its file and how it is called, prompt, thumbnail, value in each column, and why some lack."""

    path: Path
    name: str
    prompt: str
    thumbnail: str  # data URI
    values: Mapping[str, float | None]  # column -> score; None: not scored
    failure: str = ""

    @property
    def label(self) -> str:
        """How a message calls it."""
        return str(self.path)


@dataclass(frozen=True)
class Summary:
    """Column `name`: how many images have a value, and how these are distributed; NaN where there is none.

    std is that of the population. bins: counts in equal parts of [low, high], empty where all values are the same.
    """

    name: str
    count: int
    mean: float
    std: float
    low: float
    median: float
    high: float
    bins: list[int]


def summarise(name: str, values: Sequence[float | None]) -> Summary:
    """The summary of a column; values that are None are left out."""
    known = np.array([value for value in values if value is not None], dtype=np.float64)
    if not len(known):
        return Summary(name, 0, math.nan, math.nan, math.nan, math.nan, math.nan, [])
    low, high = float(known.min()), float(known.max())
    # Where the range is below what floats resolve, equal parts of it do not exist.
    flat = high - low <= 1e-9 * max(abs(low), abs(high))
    bins = [] if flat else [int(count) for count in np.histogram(known, BINS, (low, high))[0]]
    return Summary(name, len(known), float(known.mean()), float(known.std()), low, float(np.median(known)), high, bins)


def write_tables(folder: Path, images: Sequence[ScoredImage]) -> None:
    """Write `scores.csv` and `scores.jsonl` to `folder`: image, prompt, the columns of the images, failure.

    A value that lacks is an empty cell, or null. Raises `GerlError` if a file cannot be written.
    """
    rows: list[dict[str, object]] = [
        {"image": str(i.path.absolute()), "prompt": i.prompt, **i.values, "failure": i.failure or None} for i in images
    ]
    write_file(folder / "scores.csv", csv_text(list(rows[0]) if rows else COLUMNS, rows))
    write_file(folder / "scores.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def write_gallery(path: Path, title: str, images: Sequence[ScoredImage], weights: Mapping[str, float]) -> None:
    """Write a page of the images to `path`, sorted by their first column; those without a value there come last.

    weights: of the scorers, to be shown beside their names, also those of 0. All images have the same columns.
    Raises `GerlError` if the file cannot be written.
    """
    if any(list(image.values) != list(images[0].values) for image in images):
        raise ValueError("expected the same columns on all cards")
    labels = distinct_columns(images)
    columns = list(labels)
    failed = sum(image.values[columns[0]] is None for image in images) if columns else 0
    note = (
        f"{len(images)} image{'' if len(images) == 1 else 's'}, {failed} without a "
        f"{columns[0] if columns else 'score'}. Best first; click a name to sort by it, again to reverse the order."
    )
    lines = [_line(summarise(labels[name], [image.values[name] for image in images]), weights) for name in columns]
    write_file(path, card_page(title, note, HEAD, lines, [_card(image, labels) for image in images]))


def _line(summary: Summary, weights: Mapping[str, float]) -> Line:
    weight = ", ".join(f"{weights[name]:g}" for name in summary.name.split(" = ") if name in weights)
    numbers = (summary.mean, summary.std, summary.low, summary.median, summary.high)
    flat = "all the same" if summary.count else ""
    return Line(summary.name, [weight, str(summary.count), *map(show, numbers), summary.bins or flat])


def _card(image: ScoredImage, labels: Mapping[str, str]) -> Card:
    scores = {label: image.values[name] for name, label in labels.items()}
    picture = Picture(
        image.thumbnail, image.prompt, image.prompt, note=image.name, failure=image.failure, scores=scores
    )
    return Card([picture], list(scores.values()), trend="down" if image.failure else "flat")
