"""Human-readable results of a comparison: the table of the log, `scores.csv`, `summary.json` and `gallery.html`."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from gerl.evaluate.comparison import (
    FEW_PROMPTS,
    WIDTH,
    Drawn,
    Result,
    Results,
    columns,
)
from gerl.evaluate.names import BASE, COLUMNS
from gerl.pages.images import thumbnail
from gerl.pages.page import Card, Line, Picture, Sheet, card_page, show
from gerl.rewards.total import TOTAL, distinct_columns
from gerl.run.validation import CONFIDENCE, RESAMPLES, Estimate
from gerl.utils.condition_images import read_picture
from gerl.utils.files import csv_text, finite, write_file

HEAD = ("variant", "column", "prompts", "mean", "95 % interval", "vs base", "95 % interval", "wins", "95 % interval")


def table(results: Results) -> str:
    """The results for the eye: a block for each column, or for several that are the same."""
    blocks: dict[str, list[str]] = {}
    width = max(len(variant) for variants in results.values() for variant in variants)
    for column, variants in results.items():
        blocks.setdefault("\n".join(_line(v, result, width) for v, result in variants.items()), []).append(column)
    head = f"{'':<{width}} {'mean':>10}   {'95 % interval':<22} {'to base':>10}   {'95 % interval':<22} wins"
    return "\n\n".join(f"{' = '.join(names)}\n{head}\n{lines}" for lines, names in blocks.items())


def narrow(results: Results) -> str | None:
    """The sentence for intervals over too few prompts to be believed, None where there are enough."""
    count = min(result.mean.count for result in results[TOTAL].values())
    if count >= FEW_PROMPTS:
        return None
    return (
        f"The intervals are over {count} prompt{'' if count == 1 else 's'}: below {FEW_PROMPTS} they are too "
        "narrow to be meaningful; use more prompts."
    )


def _line(variant: str, result: Result, width: int) -> str:
    mean, likely, gain, likely_gain, wins, _ = _cells(result)
    return f"{variant:<{width}} {mean:>10}   {likely:<22} {gain:>10}   {likely_gain:<22} {wins}".rstrip()


def _cells(result: Result) -> list[str]:
    """Mean, difference to the base and wins, each with its interval; the last two empty for the base itself."""
    cells = [show(result.mean.mean), interval(result.mean)]
    if result.difference is None or result.win_rate is None:
        return [*cells, "", "", "", ""]
    cells += [show(result.difference.mean, "+"), interval(result.difference, "+")]
    return [*cells, percent(result.win_rate.mean), interval(result.win_rate)]


def percent(value: float) -> str:
    """A share as a percentage."""
    return "-" if math.isnan(value) else f"{value:.0%}".replace("%", " %")


def interval(estimate: Estimate, sign: str = "") -> str:
    """The interval of an estimate."""
    return "-" if math.isnan(estimate.low) else f"{show(estimate.low, sign)} to {show(estimate.high, sign)}"


def write_files(
    folder: Path,
    title: str,
    rows: Sequence[Drawn],
    results: Results,
    facts: Mapping[str, object],
    sheets: Sequence[Sheet] = (),
) -> list[Path]:
    """Write `scores.csv`, `summary.json` (`facts` and `results`) and `gallery.html` to `folder`; returns their paths.

    sheets: tables at the top of the gallery.

    Raises `GerlError` if one cannot be written.
    """
    cells: list[dict[str, object]] = [
        {"prompt_id": row.prompt_id, "image": row.index, "seed": row.seed, "variant": row.variant}
        | {"prompt": row.prompt, **row.values, "failure": row.failure}
        for row in rows
    ]
    plain = {column: {v: asdict(result) for v, result in variants.items()} for column, variants in results.items()}
    summary = {**facts, "confidence": CONFIDENCE, "resamples": RESAMPLES, "results": finite(plain)}
    contents = {
        "scores.csv": csv_text([*COLUMNS[:-1], *columns(rows)[1:], COLUMNS[-1]], cells),
        "summary.json": json.dumps(summary, indent=1, ensure_ascii=False) + "\n",
        "gallery.html": page(title, rows, results, sheets),
    }
    for name, content in contents.items():
        write_file(folder / name, content)
    return [folder / name for name in contents]


def page(title: str, rows: Sequence[Drawn], results: Results, sheets: Sequence[Sheet] = ()) -> str:
    """The gallery: a row for each prompt and image, a picture for each variant; sorted by what the first LoRA gained.

    Every line of the table sorts: that of a LoRA by its difference to the base, that of the base by its scores.
    """
    labels = distinct_columns(rows)
    places = [(column, variant) for column, variants in results.items() for variant in variants if column in labels]
    drawn: dict[tuple[int, int], dict[str, Drawn]] = {}
    for row in rows:
        drawn.setdefault((row.prompt_id, row.index), {})[row.variant] = row
    note = (
        f"{len(drawn)} row{'' if len(drawn) == 1 else 's'}: the same prompt and the same noise for all. Click a "
        "LoRA to sort by its gain over the base, or the base to sort by its score; click again to reverse the "
        f"order.{' ' + few if (few := narrow(results)) else ''}"
    )
    chosen = min(1, len(results[TOTAL]) - 1)  # the first LoRA's difference, or the base's scores
    lines = [
        Line(variant, [labels[column], str(result.mean.count), *_cells(result)], first=result.difference is None)
        for column, variants in results.items()
        if column in labels
        for variant, result in variants.items()
    ]
    cards = [_card(row, places, labels) for row in drawn.values()]
    return card_page(title, note, HEAD, lines, cards, chosen, wide="100%", least="16rem", sheets=sheets)


def _card(drawn: Mapping[str, Drawn], places: Sequence[tuple[str, str]], labels: Mapping[str, str]) -> Card:
    """The row of a prompt and image, the pictures that were given with the prompt first."""
    base = drawn[BASE]
    pictures = [
        Picture(thumbnail(np.asarray(read_picture(path)), WIDTH), "given with the prompt", note="given")
        for path in base.given
    ]
    for variant, row in drawn.items():
        gain = None if variant == BASE else _value(drawn, TOTAL, variant)
        shown, trend = "" if gain is None else show(gain, "+"), "" if not gain else "up" if gain > 0 else "down"
        alt = f"{variant}: {row.prompt}"
        scores = {label: row.values[name] for name, label in labels.items() if name in row.values}
        pictures.append(Picture(row.picture, alt, variant, shown, trend, failure=row.failure, scores=scores))
    values = [_value(drawn, column, variant) for column, variant in places]
    return Card(pictures, values, base.prompt, note=f"image {base.index + 1}" if base.index else "")


def _value(drawn: Mapping[str, Drawn], column: str, variant: str) -> float | None:
    """The score of the base, or how much that of another variant is above it."""
    own, base = (drawn[name].values.get(column) for name in (variant, BASE))
    return own if variant == BASE else None if own is None or base is None else own - base
