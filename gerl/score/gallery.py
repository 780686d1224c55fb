"""Scored images as files: `scores.csv`, `scores.jsonl`, and `gallery.html`, best first and sortable by any column."""

import csv
import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gerl.pages.images import enlarge, to_data_uri
from gerl.pages.page import render, write_text

SMALL = 128  # pixels; up to this width a thumbnail is exact and shown with sharp pixels
LARGE = 256  # pixels; wider images are reduced to this
BINS = 24

TOTAL = "total"  # the column that scorers are summed up in
COLUMNS = ("image", "prompt", TOTAL, "failure")  # of the tables, beside those of the scorers


@dataclass(frozen=True)
class Card:
    """A scored image: its file and how it is called, prompt, thumbnail, value in each column, and why some lack."""

    path: Path
    name: str
    prompt: str
    thumbnail: str  # data URI
    values: dict[str, float | None]  # column -> score; None: not scored
    failure: str = ""


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


def thumbnail(pixels: np.ndarray) -> str:
    """The image [H, W, 3] uint8 as a data URI, at most 256 pixels wide and four times as high."""
    image = enlarge(pixels, min_width=1, max_width=LARGE)
    image.thumbnail((LARGE, 4 * LARGE))
    return to_data_uri(image, lossy=image.width > SMALL)


def write_tables(folder: Path, cards: Sequence[Card]) -> None:
    """Write `scores.csv` and `scores.jsonl` to `folder`: image, prompt, the columns of the cards, failure.

    A value that lacks is an empty cell, or null. Raises `GerlError` if a file cannot be written.
    """
    rows: list[dict[str, Any]] = [
        {"image": str(card.path.absolute()), "prompt": card.prompt, **card.values, "failure": card.failure or None}
        for card in cards
    ]
    table = io.StringIO(newline="")
    writer = csv.DictWriter(table, list(rows[0]) if rows else COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(folder / "scores.csv", table.getvalue())
    write_text(folder / "scores.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def write_gallery(path: Path, title: str, cards: Sequence[Card], weights: dict[str, float]) -> None:
    """Write `cards` as a page to `path`, sorted by their first column; cards without a value there come last.

    weights: of the columns that enter the total, to be shown beside their names. All cards have the same columns.
    Raises `GerlError` if the file cannot be written.
    """
    columns = list(cards[0].values) if cards else []
    if any(list(card.values) != columns for card in cards):
        raise ValueError("expected the same columns on all cards")
    html = render(
        "gallery.html.j2",
        title=title,
        columns=[_column(summarise(name, [card.values[name] for card in cards]), weights) for name in columns],
        cards=[_card(card) for card in sorted(cards, key=lambda card: _key(card, columns))],
        failed=sum(card.values[columns[0]] is None for card in cards) if columns else 0,
        show=_show,
    )
    write_text(path, html)


def _key(card: Card, columns: Sequence[str]) -> tuple[bool, float]:
    value = card.values[columns[0]] if columns else None
    return value is None, -(value or 0.0)


def _column(summary: Summary, weights: dict[str, float]) -> dict[str, Any]:
    tallest = max(summary.bins, default=1)
    return {
        "summary": summary,
        "weight": weights.get(summary.name),
        "bars": [(i, round(30 * count / tallest, 2), count) for i, count in enumerate(summary.bins)],
        "width": BINS,
    }


def _card(card: Card) -> dict[str, Any]:
    return {"card": card, "values": list(card.values.values())}


def _show(value: float | None) -> str:
    """A score for the eye: four significant digits."""
    return "-" if value is None or math.isnan(value) else f"{value:.4g}"
