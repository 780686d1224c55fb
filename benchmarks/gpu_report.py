"""Report of a session of `benchmarks/gpu.py --minutes`: Markdown tables, and predictions beside measurements."""

import json
import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from gpu_table import GOALS, Row, gigabytes, read_rows, table

HERE = Path(__file__).resolve().parent
README, RECORD = HERE / "README.md", HERE / "results" / "gpu_session.jsonl"
TESTED, MEMORY = HERE.parent / "docs" / "tested.md", HERE.parent / "docs" / "memory.md"
SESSION = "<!-- session: begin, written by python benchmarks/gpu.py --table --out FOLDER -->", "<!-- session: end -->"
MEASURED = (
    "<!-- measured: begin, written by python benchmarks/gpu.py --table --out FOLDER -->",
    "<!-- measured: end -->",
)
NOTHING = "There is no session on record."
NEVER, RANDOM = "never run", "random weights on a GPU"
WIDTH = 120
LARGEST = 5  # metrics whose differences are reported


class ReportError(Exception):
    """The results cannot be written into the pages."""


def lines_of(path: Path) -> dict[str, Row]:
    """Return the last line of each step; truncated lines are skipped."""
    found: dict[str, Row] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        found[row["step"]] = row
    return found


def report(out: Path, dry: bool) -> str:
    """Return all tables of a session."""
    steps, rows = lines_of(out / "results.jsonl"), read_rows(out / "cases.json")
    parts = [
        "# A session on a GPU" if not dry else "# A dry run: no number below is a measurement",
        "## For benchmarks/README.md", table(rows), told(steps),
        "## For docs/tested.md", levels(TESTED.read_text(encoding="utf-8"), verified(steps, rows)),
        "## For docs/memory.md", memory_table(steps, rows),
        "## Predictions", predictions(steps, rows),
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


# --- steps in words


def told(steps: dict[str, Row]) -> str:
    """Return a line per step, except for the cases."""
    if not steps:
        return NOTHING
    return "\n".join(f"* {name}: {step_line(row)}" for name, row in steps.items() if row["figures"] or row["why"])


def step_line(row: Row) -> str:
    """Return the result of a step, or how it ended."""
    words = WORDS[row["step"]](row["figures"]) if row["figures"] and row["step"] in WORDS else ""
    ended = (
        "" if row["state"] == "done" else f"{row['state']} after {row['seconds']:.0f} s ({row['why'] or 'see its log'})"
    )
    return "; ".join(filter(None, [words, ended]))


def tests_line(found: Row) -> str:
    failed = "".join(f"; failed: {name}" for name in found["failed"])
    return f"{found['passed']} passed, {found['skipped']} skipped, {len(found['failed'])} failed{failed}"


def signs_line(found: Row) -> str:
    """Return the largest differences of metrics per pair of runs."""
    parts = [f"reward {found['reward']}"]
    for name, pair in found.items():
        if isinstance(pair, dict) and "by_metric" in pair:
            worst = sorted(pair["by_metric"].items(), key=lambda item: -item[1])[:LARGEST]
            first = next(iter(pair["by_step"].values()), 0.0)
            parts.append(
                f"{name}: metrics of the first row within {first:.1e}, then "
                + ", ".join(f"`{metric}` {off:.1e}" for metric, off in worst)
            )
    return "; ".join(parts)


def ratio_line(found: Row) -> str:
    return ", ".join(f"{way} {found[way]:.1e}" for way in ("plain", "compile") if found.get(way) is not None)


def model_line(found: Row) -> str:
    return f"{gigabytes(found['bytes'])} GB in {found['files']} files, written in {found['seconds']:.0f} s"


def train_line(found: Row) -> str:
    """Describe the times per step, the memory and the checkpoint."""
    steps = ", ".join(f"{times['timing/step_s']:.3g}" for times in found["times"])
    return (
        f"{found['steps']} steps of {found['images'][0]:.0f} images in {steps} s, {found['seconds']:.0f} s in all; "
        f"peak {gigabytes(found['peak'])} GB; checkpoint {found['checkpoint'] / 1e6:.1f} MB"
    )


def export_line(found: Row) -> str:
    return f"{found['bytes'] / 1e6:.1f} MB in {found['seconds']:.0f} s"


WORDS = {
    "tests": tests_line, "signs": signs_line, "ratio": ratio_line, "model": model_line, "train": train_line,
    "export": export_line,
}  # fmt: skip


# --- predictions


def compared(steps: dict[str, Row], rows: Sequence[Row]) -> Iterator[tuple[str, str, float, float | None]]:
    """Return (quantity, unit, prediction, measurement or None) of all predictions."""
    for row in rows:
        figures, name = row["figures"] or {}, f"{row['case']}, {row['variant']}"
        for phase in GOALS:
            if "profile" in figures:
                told, counted = figures["predicted"][phase], figures["profile"][phase]["flops"]
                yield f"{name}, {phase}", "TFLOP", told * figures["images"] / 1e12, counted / 1e12
            of = figures.get(phase)
            if of is not None and of["predicted_peak"] is not None:
                peak = None if of["peak"] is None else of["peak"] / 1e9
                yield f"{name}, {phase}, {figures['images']} images", "GB", of["predicted_peak"] / 1e9, peak
    figures = (steps.get("train") or {}).get("figures") or {}
    if told := figures.get("predicted"):
        peak = None if figures["peak"] is None else figures["peak"] / 1e9
        yield "sd35_medium_ocr, `gerl train`", "GB", max(told["phases"].values()) / 1e9, peak


def difference(told: float, found: float | None) -> str:
    return "-" if found is None else f"{found / told - 1:+.1%}"


def predictions(steps: dict[str, Row], rows: Sequence[Row]) -> str:
    """Return the table of all predictions."""
    lines = ["| what | unit | predicted | measured | difference |", "|---|---|---|---|---|"]
    for what, unit, told, found in compared(steps, rows):
        cell = "-" if found is None else f"{found:.4g}"
        lines.append(f"| {what} | {unit} | {told:.4g} | {cell} | {difference(told, found)} |")
    return "\n".join(lines)


def memory_table(steps: dict[str, Row], rows: Sequence[Row]) -> str:
    """Return the table of memory predictions that were measured."""
    found = [
        (what, told, peak) for what, unit, told, peak in compared(steps, rows) if unit == "GB" and peak is not None
    ]
    if not found:
        return NOTHING
    lines = ["| measured on a GPU | predicted, GB | measured, GB | difference |", "|---|---|---|---|"]
    return "\n".join([*lines, *(f"| {a} | {b:.3g} | {c:.3g} | {difference(b, c)} |" for a, b, c in found)])


# --- how far recipes are verified


def verified(steps: dict[str, Row], rows: Sequence[Row]) -> set[str]:
    """Return the recipes that ran on a GPU with random weights."""
    ran = {row["recipe"] for row in rows if not row["dry_run"] and "rollout" in (row["figures"] or {})}
    trained = steps.get("train", {}).get("state") == "done" and any(not row["dry_run"] for row in rows)
    return ran | ({"sd35_medium_ocr"} if trained else set())


def levels(page: str, ran: set[str]) -> str:
    """Return the lists of docs/tested.md, with `ran` listed as run with random weights on a GPU."""
    section = page.partition("## How far the recipes are verified")[2].replace("\n  ", " ")
    known = {level: set(re.findall(r"`(\w+)`", names)) for level, names in re.findall(LEVEL, section, re.MULTILINE)}
    moved = ran & known[NEVER]
    known[NEVER] -= moved
    known[RANDOM] |= moved
    return "\n".join(wrapped(level, names) for level, names in known.items())


LEVEL = r"^\* `([^`]+)`: (.*)$"


def wrapped(level: str, names: set[str]) -> str:
    words = ", ".join(f"`{name}`" for name in sorted(names)) or "none"
    return textwrap.fill(f"* `{level}`: {words}", WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def with_levels(page: str, ran: set[str]) -> str:
    """Return docs/tested.md with the lists of `levels`."""
    lists = re.search(r"^\* `never run`: .*?(?=\n\n|\Z)", page, re.MULTILINE | re.DOTALL)
    if lists is None:
        raise ReportError("docs/tested.md has no list of recipes that begins with `never run`")
    return page.replace(lists[0].rstrip("\n"), levels(page, ran))


# --- into the pages


def write_pages(out: Path) -> None:
    """Store the results of a session and write their tables into the pages; raises `ReportError` for a dry run."""
    import gpu
    from sections import write_section

    from gerl.utils.files import write_file

    rows, results = read_rows(out / "cases.json"), out / "results.jsonl"
    if not rows or any(row["dry_run"] for row in rows):
        raise ReportError(f"{out} has no measurements of a GPU: none, or those of a dry run")
    for row in rows:
        gpu.keep_row(gpu.RESULTS, row)
    gpu.write_table(gpu.RESULTS, README)
    write_file(RECORD, results.read_text(encoding="utf-8") if results.exists() else "")
    steps = lines_of(RECORD)
    write_section(README, *SESSION, told(steps))
    write_section(MEMORY, *MEASURED, memory_table(steps, rows))
    write_file(TESTED, with_levels(TESTED.read_text(encoding="utf-8"), verified(steps, rows)))
