"""Comparison of model variants on the same prompts and noise, with results as files and tables."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean

import numpy as np

from gerl.algorithms.planning import validation_seed
from gerl.errors import DataError
from gerl.evaluate.loras import BASE, COLUMNS
from gerl.evaluate.suites import Column, PinnedSuite, Suite
from gerl.protocol import Images, Prompt, Sample, Scores
from gerl.rewards.total import TOTAL, distinct_columns, score_row
from gerl.run.attempts import attempts, is_printed
from gerl.run.validation import (
    CONFIDENCE,
    Estimate,
    differences,
    estimate,
    gain_ends,
    interval,
    known,
    mean_interval,
)
from gerl.utils.condition_images import pictures_of, read_picture
from gerl.utils.files import csv_text, finite, write_file
from gerl.utils.pages import Card, Line, Picture, Sheet, card_page, show, thumbnail

WIDTH = 384  # maximum width of thumbnails in pixels
REQUEST = "request"  # column of a turn with what the model was asked


@dataclass(frozen=True)
class TurnImage:
    """Image of turn `number` of an episode, taken by `role`; `request`: what it was asked instead of the prompt, or "";
    `picture`: a data URI.
    """

    number: int
    role: str
    request: str
    picture: str


@dataclass(frozen=True)
class ScoredRow:
    """Image `index` of a prompt, sampled by `variant` from the noise of `seed`; `picture` is a data URI.

    values: column -> score; None if missing, with the reason in `failure`. given: files of the prompt's condition
    images. turns: of an episode, its images; the last one is that of the row.
    """

    prompt_id: int
    prompt: str
    index: int
    seed: int
    variant: str
    values: dict[str, float | None]
    failure: str = ""
    picture: str = ""
    given: tuple[str, ...] = ()
    turns: tuple[TurnImage, ...] = ()

    @property
    def label(self) -> str:
        """Name of the image in messages."""
        return f"the image of {self.variant} for {self.prompt!r}"

    @property
    def requests(self) -> dict[str, str]:
        """What the turns were asked instead of the prompt, by column."""
        return {f"turn_{turn.number}/{REQUEST}": turn.request for turn in self.turns if turn.request}


@dataclass(frozen=True)
class Result:
    """Results of a variant in one column: the mean, the difference to the base, and the win rate against it.

    Difference and win rate are paired, on the same noise, over prompts scored for both. A tie counts as half a win.
    With several LoRAs the intervals of their differences, and those of their win rates, hold together (Bonferroni).
    """

    mean: Estimate
    difference: Estimate | None = None
    win_rate: Estimate | None = None


Results = dict[str, dict[str, Result]]  # column, or one derived from it (`gerl.run.attempts`) -> variant -> result
Task = tuple[str, list[Sample]]  # a variant and its micro-batch


def plan(batch: Sequence[Sample], variants: Sequence[str], images: int, each: int = 1) -> list[Task]:
    """Plan `images` images per prompt and variant for a micro-batch of the trainer's validation.

    each: images per prompt in the validation. They keep its noise and their neighbours in the micro-batch, since the
    last bits of an image depend on both. Images of different variants do not form a group.
    """
    tasks = []
    for first in range(0, images, each):
        chosen = [(sample, sample.index + first) for sample in batch if sample.index + first < images]
        samples = [replace(sample, index=k, seed=validation_seed(sample.prompt, k)) for sample, k in chosen]
        tasks += [(variant, [replace(sample, role=variant) for sample in samples]) for variant in variants if samples]
    return tasks


def scored_rows(variant: str, samples: Sequence[Sample], scores: Scores, images: Images) -> list[ScoredRow]:
    """Return the rows of a micro-batch."""
    rows = []
    for i, sample in enumerate(samples):
        prompt, picture = sample.prompt, thumbnail(images.pixels[i], WIDTH)
        place = (prompt.id, prompt.text, sample.index, sample.seed, variant)
        rows.append(ScoredRow(*place, *score_row(scores, i), picture, pictures_of(prompt)))
    return rows


def compare(rows: Sequence[ScoredRow], success: Mapping[str, float] | None = None) -> Results:
    """Return the results by column, and by variant in order of appearance.

    Columns derived from a column follow it: `COLUMN/success_rate` with its threshold in `success`, and, with several
    images per prompt, `COLUMN/best_of_n` and `COLUMN/pass_at_K`, see `gerl.run.attempts`.
    """
    variants = list(dict.fromkeys(row.variant for row in rows))
    places = list(dict.fromkeys((row.prompt_id, row.index) for row in rows))
    ids = [prompt_id for prompt_id, _ in places]
    cells = {(row.variant, row.prompt_id, row.index): row.values for row in rows}
    results: Results = {}
    for column in columns(rows):
        scores = {v: [cells.get((v, *place), {}).get(column) for place in places] for v in variants}
        ends = _ends([value for of_variant in scores.values() for value in known(of_variant)])
        results[column] = _paired(ids, scores, {v: estimate(ids, of_variant, ends) for v, of_variant in scores.items()})
        derived = {v: attempts(ids, of_variant, (success or {}).get(column)) for v, of_variant in scores.items()}
        for name, first in derived[variants[0]].items():
            means = {v: derived_columns[name].estimate(ends) for v, derived_columns in derived.items()}
            best = {v: derived_columns[name].values for v, derived_columns in derived.items()}
            results[f"{column}/{name}"] = _paired(first.ids, best, means, (0.0, 1.0) if first.share else None)
    return results


def _paired(
    ids: Sequence[int],
    scores: Mapping[str, Sequence[float | None]],
    means: Mapping[str, Estimate],
    ends: tuple[float, float] | None = None,
) -> dict[str, Result]:
    """Return the results of a column with the `scores` [N] and `means` of each variant, compared with the base's.

    ends: the least and the largest possible score, if they are known.
    """
    sure = together(list(scores))
    results: dict[str, Result] = {}
    for variant, of_variant in scores.items():
        if variant == BASE:
            results[variant] = Result(means[variant])
            continue
        gains = differences(scores[BASE], of_variant)
        wins = [None if gain is None else 1.0 if gain > 0 else 0.5 if gain == 0 else 0.0 for gain in gains]
        reach = gain_ends(known(gains), ends or (known(scores[BASE]) + known(of_variant)))
        difference = estimate(ids, gains, reach, sure)
        results[variant] = Result(means[variant], difference, estimate(ids, wins, (0.0, 1.0), sure))
    return results


def together(variants: Sequence[str]) -> float:
    """Return the confidence of each LoRA's interval with which those of all LoRAs hold together (Bonferroni)."""
    return 1 - (1 - CONFIDENCE) / max(len(variants) - 1, 1)


def _ends(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the least and the largest value of a column, None without any."""
    return (min(values), max(values)) if values else None


def columns(rows: Sequence[ScoredRow]) -> list[str]:
    """Return the columns of all rows, the total first."""
    return list(dict.fromkeys([TOTAL, *(name for row in rows for name in row.values)]))


# --- Output of a comparison: the table in the log, `scores.csv`, `summary.json` and `gallery.html`

HEAD = ("variant", "column", "prompts", "mean", "95 % interval", "vs base", "95 % interval", "wins", "95 % interval")


def table(results: Results) -> str:
    """Format the results as text, with a block per column; columns with equal results share one."""
    blocks: dict[str, list[str]] = {}
    width = max(len(variant) for variants in results.values() for variant in variants)
    for column, variants in results.items():
        if not is_printed(column, results):
            continue
        blocks.setdefault("\n".join(_line(v, result, width) for v, result in variants.items()), []).append(column)
    head = f"{'':<{width}} {'mean':>10}   {'95 % interval':<22} {'vs base':>10}   {'95 % interval':<22} wins"
    return "\n\n".join(f"{' = '.join(names)}\n{head}\n{lines}" for lines, names in blocks.items())


def joint(results: Results) -> str | None:
    """Return what the intervals of several LoRAs hold for, None for a single one."""
    count = len(results[TOTAL]) - 1
    if count < 2:
        return None
    return (
        f"In each column the {count} intervals of differences to the base hold together with 95 %, and so do those of "
        f"wins: each has {100 * together(list(results[TOTAL])):.3g} % (Bonferroni)."
    )


def _line(variant: str, result: Result, width: int) -> str:
    mean, likely, gain, likely_gain, wins, _ = _cells(result)
    return f"{variant:<{width}} {mean:>10}   {likely:<22} {gain:>10}   {likely_gain:<22} {wins}".rstrip()


def _cells(result: Result) -> list[str]:
    """Format mean, difference to the base and wins, each with its interval; the last two are empty for the base."""
    cells = [show(result.mean.mean), interval(result.mean)]
    if result.difference is None or result.win_rate is None:
        return [*cells, "", "", "", ""]
    cells += [show(result.difference.mean, "+"), interval(result.difference, "+")]
    wins = result.win_rate.mean
    return [*cells, "-" if math.isnan(wins) else f"{100 * wins:.0f} %", interval(result.win_rate)]


def write_files(
    folder: Path,
    title: str,
    rows: Sequence[ScoredRow],
    results: Results,
    facts: Mapping[str, object],
    sheets: Sequence[Sheet] = (),
    remarks: Sequence[str] = (),
) -> list[Path]:
    """Write `scores.csv`, `summary.json` (`facts` and `results`) and `gallery.html` to `folder`; return their paths.

    sheets: tables at the top of the gallery. remarks: sentences about the results. Raises `GerlError` if a file cannot
    be written.
    """
    cells: list[dict[str, object]] = [
        {"prompt_id": row.prompt_id, "image": row.index, "seed": row.seed, "variant": row.variant}
        | {"prompt": row.prompt, **row.requests, **row.values, "failure": row.failure}
        for row in rows
    ]
    requests = list(dict.fromkeys(name for row in rows for name in row.requests))
    head = [*COLUMNS[:-2], *requests, *columns(rows), COLUMNS[-1]]
    plain = {column: {v: asdict(result) for v, result in variants.items()} for column, variants in results.items()}
    summary = {**facts, "remarks": list(remarks), "confidence": CONFIDENCE, "results": finite(plain)}
    contents = {
        "scores.csv": csv_text(head, cells),
        "summary.json": json.dumps(summary, indent=1, ensure_ascii=False) + "\n",
        "gallery.html": page(title, rows, results, sheets, remarks),
    }
    for name, content in contents.items():
        write_file(folder / name, content)
    return [folder / name for name in contents]


def page(
    title: str, rows: Sequence[ScoredRow], results: Results, sheets: Sequence[Sheet] = (), remarks: Sequence[str] = ()
) -> str:
    """Render the gallery: a row per prompt and image with all variants, sorted by the gain of the first LoRA.

    A click on a line of the table sorts by a LoRA's difference to the base, or by the base's scores.
    """
    labels = distinct_columns(rows)
    places = [(column, variant) for column, variants in results.items() for variant in variants if column in labels]
    by_variant: dict[tuple[int, int], dict[str, ScoredRow]] = {}
    for row in rows:
        by_variant.setdefault((row.prompt_id, row.index), {})[row.variant] = row
    count = f"{len(by_variant)} row{'' if len(by_variant) == 1 else 's'}"
    note = (
        f"{count}: the same prompt and the same noise for all. Click a LoRA to sort by its gain over the base, or the "
        "base to sort by its score; click again to reverse the order."
    )
    chosen = min(1, len(results[TOTAL]) - 1)  # the first LoRA's difference, otherwise the base's scores
    lines = [
        Line(variant, [labels[column], str(result.mean.count), *_cells(result)], first=result.difference is None)
        for column, variants in results.items()
        if column in labels
        for variant, result in variants.items()
    ]
    cards = [_card(row, places, labels) for row in by_variant.values()]
    others = [*sheets, *_derived_sheet(results, columns(rows))]
    return card_page(
        title, " ".join([note, *remarks]), HEAD, lines, cards, chosen, wide="100%", least="16rem", sheets=others
    )


def _derived_sheet(results: Results, measured: Sequence[str]) -> list[Sheet]:
    """Return a table of the columns that are not `measured` by image but derived from those, if there are any."""
    lines = [
        (variant, column, str(result.mean.count), *_cells(result))
        for column, variants in results.items()
        if column not in measured and is_printed(column, results)
        for variant, result in variants.items()
    ]
    return [Sheet("success rates, and the best of several images of a prompt", (), HEAD, lines)] if lines else []


def _card(by_variant: Mapping[str, ScoredRow], places: Sequence[tuple[str, str]], labels: Mapping[str, str]) -> Card:
    base = by_variant[BASE]
    pictures = [
        Picture(thumbnail(np.asarray(read_picture(path)), WIDTH), "given with the prompt", note="given")
        for path in base.given
    ]
    for variant, row in by_variant.items():
        for turn in row.turns[:-1]:
            words = f"{variant}, turn {turn.number} ({turn.role})"
            pictures.append(Picture(turn.picture, f"{words}: {row.prompt}", words, note=turn.request))
        gain = None if variant == BASE else _value(by_variant, TOTAL, variant)
        shown, trend = "" if gain is None else show(gain, "+"), "" if not gain else "up" if gain > 0 else "down"
        alt = f"{variant}: {row.prompt}"
        scores = {label: row.values[name] for name, label in labels.items() if name in row.values}
        asked = row.turns[-1].request if row.turns else ""
        pictures.append(Picture(row.picture, alt, variant, shown, trend, asked, row.failure, scores))
    values = [_value(by_variant, column, variant) for column, variant in places]
    return Card(pictures, values, base.prompt, note=f"image {base.index + 1}" if base.index else "")


def _value(by_variant: Mapping[str, ScoredRow], column: str, variant: str) -> float | None:
    value, base = (by_variant[name].values.get(column) for name in (variant, BASE))
    return value if variant == BASE else None if value is None or base is None else value - base


# --- Results of a suite: measured columns and tasks, next to the published rows

SUITE_HEAD = ("measured here", "variant", "prompts", "mean", "95 % interval", "vs base", "95 % interval")
Place = tuple[int, int]  # prompt id and image index


@dataclass(frozen=True)
class SuiteMean:
    """Mean of a suite's column for a variant, over prompts or tasks, or over the prompts of one `task`."""

    column: str
    variant: str
    mean: Estimate
    difference: Estimate | None
    task: str | None = None


@dataclass(frozen=True)
class SuiteResults:
    """Results of a suite. deviations: from the published protocol, in addition to `pinned.suite.differs`."""

    pinned: PinnedSuite
    measured: tuple[SuiteMean, ...]
    deviations: tuple[str, ...]


def tasks_of(suite: Suite, prompts: Sequence[Prompt]) -> dict[int, str]:
    """Return the tasks by prompt id, empty if the suite has no tasks. Raises `DataError` for an unknown task."""
    if suite.tasks is None:
        return {}
    tasks = {prompt.id: str(prompt.metadata.get(suite.tasks.column)) for prompt in prompts}
    if odd := [task for task in tasks.values() if task not in suite.tasks.names]:
        raise DataError(
            f"a prompt of the suite has {suite.tasks.column}={odd[0]}, expected one of {', '.join(suite.tasks.names)}"
        )
    return tasks


def measure(suite: Suite, tasks: Mapping[int, str], rows: Sequence[ScoredRow]) -> list[SuiteMean]:
    """Return the means of all scored columns of the suite by variant, and by task for columns over tasks."""
    variants = list(dict.fromkeys(row.variant for row in rows))
    means = []
    for name, column in suite.columns.items():
        scores: dict[str, dict[Place, float]] = {variant: {} for variant in variants}
        for row in rows:
            if (value := row.values.get(name)) is not None:
                scores[row.variant][row.prompt_id, row.index] = value * column.factor
        all_scores = [score for of_task in scores.values() for score in of_task.values()]
        if not all_scores:
            continue
        names = suite.tasks.names if suite.tasks and column.over == "tasks" else ()
        for task, variant in product((None, *names), variants):
            of_task = {place: score for place, score in scores[variant].items() if task in (None, tasks.get(place[0]))}
            gains = {place: score - scores[BASE][place] for place, score in of_task.items() if place in scores[BASE]}
            if of_task or task is None:
                mean = _estimate(of_task, column, tasks, _ends(all_scores))
                ends = gain_ends(list(gains.values()), all_scores)
                difference = None if variant == BASE else _estimate(gains, column, tasks, ends, together(variants))
                means.append(SuiteMean(name, variant, mean, difference, task))
    return means


def _estimate(
    scores: Mapping[Place, float],
    column: Column,
    tasks: Mapping[int, str],
    ends: tuple[float, float] | None = None,
    confidence: float = CONFIDENCE,
) -> Estimate:
    """Return the mean over prompts, or over task means; without an interval if a task has a single prompt."""
    prompts: dict[int, list[float]] = {}
    for (prompt, _), value in scores.items():
        prompts.setdefault(prompt, []).append(value)
    by_task: dict[str, list[float]] = {}
    for prompt, values in prompts.items():
        by_task.setdefault(tasks[prompt] if column.over == "tasks" else "", []).append(fmean(values))
    groups = [by_task[task] for task in sorted(by_task)]
    enough = groups and all(len(group) > 1 for group in groups)
    low, high = mean_interval(groups, ends, confidence) if enough else (math.nan, math.nan)
    return Estimate(fmean(map(fmean, groups)) if groups else math.nan, low, high, len(prompts))


def missing_parts(pinned: PinnedSuite, tasks: Mapping[int, str], rows: Sequence[ScoredRow]) -> list[str]:
    """Describe the parts of the suite missing in `rows`: prompts not sampled, empty tasks, images without a score."""
    wanted = pinned.suite.prompts
    assert wanted is not None  # `pin` refuses suites without
    sampled = {row.prompt_id for row in rows}
    missing = [] if len(sampled) == wanted.count else [f"{len(sampled)} of {wanted.count} prompts"]
    if pinned.suite.tasks is not None:
        without = [task for task in pinned.suite.tasks.names if task not in {tasks[prompt] for prompt in sampled}]
        missing += [f"no prompt of {', '.join(without)}"] if without else []
    for name, column in pinned.suite.columns.items():
        scored = sum(row.values.get(name) is not None for row in rows)
        if 0 < scored < len(rows):
            missing.append(f"{len(rows) - scored} of {len(rows)} images without {column.measured}")
    return missing


def remarks(results: SuiteResults) -> list[str]:
    """Return remarks on the results: the protocol, and all deviations from it."""
    pinned, suite = results.pinned, results.pinned.suite
    lines = [f"{suite.title} ({suite.source})"]
    if pinned.protocol is not None:
        lines.append(f"protocol {pinned.protocol}: {suite.protocols[pinned.protocol].source}")
    lines += [] if results.measured else ["none of its columns was scored"]
    lines += [f"not measured: {text}" for text in pinned.absent]
    lines += [f"differs in gerl: {text}" for text in suite.differs]
    lines += [f"no published rows: {suite.unpublished}"] if suite.unpublished else []
    lines += [f"DEVIATION, not the published protocol: {text}" for text in results.deviations]
    return lines


def sheets(results: SuiteResults) -> list[Sheet]:
    """Return a table of the measured results with all remarks, and a separate one of the published rows."""
    suite = results.pinned.suite
    measured = Sheet(
        f"suite {results.pinned.name}" + (", with deviations" if results.deviations else ""),
        remarks(results),
        SUITE_HEAD,
        [_suite_line(suite, m) for m in results.measured],
    )
    sources = list(dict.fromkeys(row.source for row in suite.published))
    tasks = suite.tasks.names if suite.tasks and any(row.tasks for row in suite.published) else ()
    head = ("published, not measured here", "trained with", *(c.name for c in suite.columns.values()), *tasks, "source")
    lines = [
        (row.model, row.trained or "-", *(show(row.values.get(c)) for c in suite.columns))
        + (*(show(row.tasks.get(task)) for task in tasks), f"[{sources.index(row.source) + 1}]")
        for row in suite.published
    ]
    notes = [f"[{i}] {source}" for i, source in enumerate(sources, start=1)]
    return [measured, Sheet("published, not measured here", notes, head, lines)] if lines else [measured]


def _suite_line(suite: Suite, measured: SuiteMean) -> tuple[str, ...]:
    column = suite.columns[measured.column]
    over = f"{column.measured}, mean over tasks" if column.over == "tasks" else column.measured
    mean, gain = measured.mean, measured.difference
    gained = ("", "") if gain is None else (show(gain.mean, "+"), interval(gain, "+"))
    task = measured.task
    if task is not None and task.isdigit() and suite.tasks is not None:
        task = f"{suite.tasks.column} {task}"
    name = f"  {task}" if task else over
    return (name, measured.variant, str(mean.count), show(mean.mean), interval(mean), *gained)


def text(results: SuiteResults) -> str:
    """Format the sheets for the log."""
    blocks = []
    for sheet in sheets(results):
        table = [sheet.head, *sheet.lines]
        widths = [max(len(line[i]) for line in table) for i in range(len(sheet.head))]
        lines = ["   ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in table]
        blocks.append("\n".join([sheet.title, *sheet.remarks, "", *lines]))
    return "\n\n".join(blocks)


def facts(results: SuiteResults) -> dict[str, object]:
    """Return the results for `summary.json`, with measured and published numbers strictly separate."""
    pinned, suite = results.pinned, results.pinned.suite
    assert suite.prompts is not None  # `pin` refuses suites without
    protocol = None if pinned.protocol is None else asdict(suite.protocols[pinned.protocol])
    return {
        "name": pinned.name,
        "title": suite.title,
        "source": suite.source,
        "prompts": asdict(suite.prompts),
        "protocol": None if protocol is None else {"name": pinned.protocol, **protocol},
        "protocol_kept": not results.deviations,
        "deviations": list(results.deviations),
        "differs": list(suite.differs),
        "not_measured": list(pinned.absent),
        "measured": [asdict(m) for m in results.measured],
        "published": [asdict(row) for row in suite.published],
        "unpublished": suite.unpublished,
    }
