"""A comparison for the eye: the table of the log, `scores.csv`, `summary.json` and `gallery.html`."""

import csv
import io
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from gerl.evaluate.comparison import BASE, CONFIDENCE, RESAMPLES, Drawn, Estimate, Result, Results, columns, picture
from gerl.pages.page import render, write_text
from gerl.score.gallery import TOTAL
from gerl.utils.condition_images import read_picture

COLUMNS = ("prompt_id", "image", "seed", "variant", "prompt", TOTAL, "failure")  # of scores.csv, beside the scorers'


@dataclass(frozen=True)
class Card:
    """A prompt's images from the same noise, by variant, and by what the page sorts them."""

    drawn: dict[str, Drawn]
    values: list[float | None]


def table(results: Results) -> str:
    """The results for the eye: a block for each column, or for several that are the same."""
    blocks: dict[str, list[str]] = {}
    width = max(len(variant) for variants in results.values() for variant in variants)
    for column, variants in results.items():
        blocks.setdefault("\n".join(_line(v, result, width) for v, result in variants.items()), []).append(column)
    head = f"{'':<{width}} {'mean':>10}   {'95 % interval':<22} {'to base':>10}   {'95 % interval':<22} wins"
    return "\n\n".join(f"{' = '.join(names)}\n{head}\n{lines}" for lines, names in blocks.items())


def _line(variant: str, result: Result, width: int) -> str:
    line = f"{variant:<{width}} {show(result.mean.mean):>10}   {interval(result.mean):<22}"
    if result.difference is not None and result.win_rate is not None:
        difference = f"{show(result.difference.mean, '+'):>10}   {interval(result.difference, '+'):<22}"
        line += f" {difference} {percent(result.win_rate.mean)}"
    return line.rstrip()


def show(value: float | None, sign: str = "") -> str:
    """A number with four significant digits; `sign` "+" shows the sign of positive ones too."""
    return "-" if value is None or math.isnan(value) else f"{value:{sign}.4g}"


def percent(value: float) -> str:
    """A share as a percentage."""
    return "-" if math.isnan(value) else f"{value:.0%}".replace("%", " %")


def interval(estimate: Estimate, sign: str = "") -> str:
    """The interval of an estimate."""
    return "-" if math.isnan(estimate.low) else f"{show(estimate.low, sign)} to {show(estimate.high, sign)}"


def write_files(folder: Path, title: str, rows: Sequence[Drawn], results: Results, facts: dict[str, Any]) -> list[Path]:
    """Write `scores.csv`, `summary.json` (`facts` and `results`) and `gallery.html` to `folder`; returns their paths.

    Raises `GerlError` if one cannot be written.
    """
    scores = io.StringIO(newline="")
    writer = csv.DictWriter(scores, [*COLUMNS[:-1], *columns(rows)[1:], COLUMNS[-1]], lineterminator="\n")
    writer.writeheader()
    for row in rows:
        place = {"prompt_id": row.prompt_id, "image": row.index, "seed": row.seed, "variant": row.variant}
        writer.writerow({**place, "prompt": row.prompt, **row.values, "failure": row.failure})
    summary = {**facts, "confidence": CONFIDENCE, "resamples": RESAMPLES, "results": _plain(results)}
    contents = {
        "scores.csv": scores.getvalue(),
        "summary.json": json.dumps(summary, indent=1, ensure_ascii=False) + "\n",
        "gallery.html": page(title, rows, results),
    }
    for name, content in contents.items():
        write_text(folder / name, content)
    return [folder / name for name in contents]


def _plain(results: Results) -> dict[str, Any]:
    """The results as JSON has them: null where a number is missing."""

    def numbers(found: Estimate | None) -> dict[str, Any] | None:
        given = {} if found is None else asdict(found)
        return {k: None if math.isnan(v) else v for k, v in given.items()} or None

    return {
        column: {
            variant: {f.name: numbers(getattr(result, f.name)) for f in fields(result)}
            for variant, result in variants.items()
        }
        for column, variants in results.items()
    }


def page(title: str, rows: Sequence[Drawn], results: Results) -> str:
    """The gallery: a row for each prompt and image, a picture for each variant; sorted by what the first LoRA gained.

    Every line of the table sorts: that of a LoRA by its difference to the base, that of the base by its scores.
    """
    lines = [(column, v, result) for column, variants in results.items() for v, result in variants.items()]
    places: dict[tuple[int, int], dict[str, Drawn]] = {}
    for row in rows:
        places.setdefault((row.prompt_id, row.index), {})[row.variant] = row
    cards = [Card(drawn, [_value(drawn, column, variant) for column, variant, _ in lines]) for drawn in places.values()]
    chosen = min(1, len(results[TOTAL]) - 1)  # the first LoRA's difference, or the base's scores
    cards.sort(key=lambda card: _key(card.values[chosen]))
    return render(
        "comparison.html.j2",
        title=title,
        lines=lines,
        cards=[(card, {v: _value(card.drawn, TOTAL, v) for v in card.drawn if v != BASE}) for card in cards],
        shown=lambda path: picture(np.asarray(read_picture(path))),
        chosen=chosen,
        show=show,
        interval=interval,
        percent=percent,
    )


def _key(value: float | None) -> tuple[bool, float]:
    """Highest first, then what has no value."""
    return value is None, -(value or 0.0)


def _value(drawn: dict[str, Drawn], column: str, variant: str) -> float | None:
    """The score of the base, or how much that of another variant is above it."""
    own, base = (drawn[name].values.get(column) for name in (variant, BASE))
    return own if variant == BASE else None if own is None or base is None else own - base
