"""The numbers of a suite: its columns and tasks as measured, beside the rows that were published."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby

from gerl.errors import DataError
from gerl.evaluate.comparison import Drawn
from gerl.evaluate.files import interval
from gerl.evaluate.names import BASE
from gerl.evaluate.suites import Column, Pinned, Suite
from gerl.pages.page import Sheet, show
from gerl.protocol import Prompt
from gerl.run.validation import Estimate, bootstrap_groups

HEAD = ("measured here", "variant", "prompts", "mean", "95 % interval", "vs base", "95 % interval")
Place = tuple[int, int]  # prompt and image


@dataclass(frozen=True)
class Measured:
    """A column of the suite for a variant, over its prompts or tasks, or over the prompts of one `task`."""

    column: str
    variant: str
    mean: Estimate
    difference: Estimate | None
    task: str | None = None


@dataclass(frozen=True)
class SuiteResults:
    """Results of a suite. deviations: how they differ from the published protocol, beyond `pinned.suite.differs`."""

    pinned: Pinned
    measured: tuple[Measured, ...]
    deviations: tuple[str, ...]


def tasks_of(suite: Suite, prompts: Sequence[Prompt]) -> dict[int, str]:
    """The task of each prompt by its id, empty where the suite has none; raises `DataError` for an unknown one."""
    if suite.tasks is None:
        return {}
    found = {prompt.id: str(prompt.metadata.get(suite.tasks.column)) for prompt in prompts}
    if odd := [task for task in found.values() if task not in suite.tasks.names]:
        raise DataError(
            f"a prompt of the suite has {suite.tasks.column}={odd[0]}, expected one of {', '.join(suite.tasks.names)}"
        )
    return found


def measure(suite: Suite, tasks: Mapping[int, str], rows: Sequence[Drawn]) -> list[Measured]:
    """Each column of the suite that was scored for each variant, and where it is over tasks, each task."""
    variants = list(dict.fromkeys(row.variant for row in rows))
    found = []
    for name, column in suite.columns.items():
        scores = {v: _scores(rows, v, name, column.factor) for v in variants}
        if not any(scores.values()):
            continue
        for variant in variants:
            gains = {p: s - scores[BASE][p] for p, s in scores[variant].items() if p in scores[BASE]}
            parts = (_by_prompt(scores[variant]), None if variant == BASE else _by_prompt(gains))
            found += [Measured(name, variant, *_estimates(parts, column, tasks))]
            for task in suite.tasks.names if suite.tasks and column.over == "tasks" else ():
                own = [part and {p: v for p, v in part.items() if tasks[p] == task} for part in parts]
                if own[0]:
                    found.append(Measured(name, variant, *_estimates(own, column, tasks), task))
    return sorted(found, key=lambda m: (list(suite.columns).index(m.column), m.task is not None, _rank(suite, m.task)))


def _rank(suite: Suite, task: str | None) -> int:
    return suite.tasks.names.index(task) if suite.tasks and task is not None else -1


def _scores(rows: Sequence[Drawn], variant: str, column: str, factor: float) -> dict[Place, float]:
    own = ((row, row.values.get(column)) for row in rows if row.variant == variant)
    return {(row.prompt_id, row.index): value * factor for row, value in own if value is not None}


def _by_prompt(scores: Mapping[Place, float]) -> dict[int, float]:
    """The mean over the images of each prompt."""
    groups: dict[int, list[float]] = {}
    for (prompt, _), value in scores.items():
        groups.setdefault(prompt, []).append(value)
    return {prompt: math.fsum(values) / len(values) for prompt, values in groups.items()}


def _estimates(
    parts: Sequence[Mapping[int, float] | None], column: Column, tasks: Mapping[int, str]
) -> tuple[Estimate, Estimate | None]:
    """Mean and difference of values by prompt."""
    mean, difference = (None if part is None else _estimate(part, column, tasks) for part in parts)
    assert mean is not None
    return mean, difference


def _estimate(values: Mapping[int, float], column: Column, tasks: Mapping[int, str]) -> Estimate:
    """The mean over prompts, or of the means of the tasks; resampled are the prompts, task by task."""
    key = (lambda prompt: tasks[prompt]) if column.over == "tasks" else lambda _: ""
    ordered = sorted(values, key=key)
    groups = [[values[prompt] for prompt in members] for _, members in groupby(ordered, key)]
    mean = math.fsum(math.fsum(group) / len(group) for group in groups) / len(groups) if groups else math.nan
    low, high = bootstrap_groups(groups) if any(len(group) > 1 for group in groups) else (math.nan, math.nan)
    return Estimate(mean, low, high, len(values))


def unfinished(pinned: Pinned, tasks: Mapping[int, str], rows: Sequence[Drawn]) -> list[str]:
    """The parts of the suite that `rows` lack: prompts not drawn, tasks without any, images without a score."""
    wanted = pinned.suite.prompts
    assert wanted is not None  # it is not missing
    drawn = {row.prompt_id for row in rows}
    found = [] if len(drawn) == wanted.count else [f"{len(drawn)} of {wanted.count} prompts"]
    if pinned.suite.tasks is not None:
        without = [task for task in pinned.suite.tasks.names if task not in {tasks[prompt] for prompt in drawn}]
        found += [f"no prompt of {', '.join(without)}"] if without else []
    for name, column in pinned.suite.columns.items():
        scored = sum(row.values.get(name) is not None for row in rows)
        if 0 < scored < len(rows):
            found.append(f"{len(rows) - scored} of {len(rows)} images without {column.measured}")
    return found


def remarks(results: SuiteResults) -> list[str]:
    """All that has to be said with the numbers: the protocol, and all that differs from it."""
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
    """A table of the measured numbers with all remarks, and apart from it one of the published rows."""
    suite = results.pinned.suite
    measured = Sheet(
        f"suite {results.pinned.name}" + (", with deviations" if results.deviations else ""),
        remarks(results),
        HEAD,
        [_line(suite, m) for m in results.measured],
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


def _line(suite: Suite, measured: Measured) -> tuple[str, ...]:
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
    """The sheets for the log."""
    blocks = []
    for sheet in sheets(results):
        table = [sheet.head, *sheet.lines]
        widths = [max(len(line[i]) for line in table) for i in range(len(sheet.head))]
        lines = ["   ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in table]
        blocks.append("\n".join([sheet.title, *sheet.remarks, "", *lines]))
    return "\n\n".join(blocks)


def facts(results: SuiteResults) -> dict[str, object]:
    """The results for `summary.json`: `published` holds nothing that was measured, `measured` nothing published."""
    pinned, suite = results.pinned, results.pinned.suite
    assert suite.prompts is not None  # it is not missing
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
