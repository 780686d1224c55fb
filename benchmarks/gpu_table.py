"""Tables of the results of benchmarks/gpu.py, made without torch."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

GOALS = {"rollout": 0.55, "update": 0.45}  # of the GPU's published peak
UNUSABLE = "an earlier variant left the device unusable; run this one alone with --variants"
Row = dict[str, Any]


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a file; [] if it is missing."""
    rows: list[Row] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    return rows


def table(rows: Sequence[Row]) -> str:
    """Return a Markdown table of the measured variants and all-reduces, and the reasons of failed ones."""
    if not rows:
        return "There is no run on record."
    head = (
        "case", "variant", "images at once", "rollout, images/s", "share of peak", "update, images/s", "share of peak",
        "rollout, GB (predicted)", "update, GB (predicted)", "max abs(ratio - 1)",
    )  # fmt: skip
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    lines += [line(row) for row in rows if row["figures"] and "rollout" in row["figures"]]
    lines += ["", *goals(rows)]
    lines += [
        f"* {r['case']}, `{r['variant']}`: {note}." for r in rows if r["figures"] for note in r["figures"]["notes"]
    ]
    lines += [f"* {row['case']}: {reduced(row['figures'])}" for row in rows if "bytes_s" in (row["figures"] or {})]
    lines += [profile_line(row) for row in rows if "profile" in (row["figures"] or {})]
    lines += [f"* {row['case']}, `{row['variant']}`: {row['refused']}" for row in rows if row["refused"]]
    for about in dict.fromkeys((row["device"], row["software"]["packages"]["torch"], row["command"]) for row in rows):
        lines += ["", "Made on {} with torch {} by `{}`.".format(*about)]
    return "\n".join(lines)


def goals(rows: Sequence[Row]) -> list[str]:
    """Return, per phase, how many of the variants with a known share reach its goal."""
    found: list[str] = []
    for phase, goal in GOALS.items():
        shares = [row["figures"][phase]["share"] for row in rows if phase in (row["figures"] or {})]
        known = [share for share in shares if share is not None]
        if known:
            reached = sum(share >= goal for share in known)
            found.append(f"* {phase}: {reached} of {len(known)} reach the goal, {percent(goal)} of the peak.")
    return found


def line(row: Row) -> str:
    """Return the table row of a measured variant."""
    figures = row["figures"]
    phases = figures["rollout"], figures["update"]
    speed = [cell for work in phases for cell in (f"{work['images_s']:.3g}", percent(work["share"]))]
    memory = [f"{gigabytes(work['peak'])} ({gigabytes(work['predicted_peak'])})" for work in phases]
    deviation = figures["ratio_deviation"]
    ratio = "-" if deviation is None else f"{deviation:.1e}"
    return f"| {' | '.join([row['case'], row['variant'], str(figures['images']), *speed, *memory, ratio])} |"


def profile_line(row: Row) -> str:
    """Describe the launches, copies and waits of a micro-batch."""
    parts = [
        f"{phase} {of['launches']:,} launches, {of['copies']:,} copies, {of['waits']:,} waits"
        for phase, of in ((phase, row["figures"]["profile"][phase]) for phase in GOALS)
    ]
    return f"* {row['case']}, {row['figures']['images']} images, by torch's profiler: {'; '.join(parts)}."


def reduced(figures: Row) -> str:
    """Describe an all-reduce."""
    return (
        f"an all-reduce ({figures['backend']}, one process) of {figures['bytes'] / 1e6:.3g} MB takes "
        f"{1e3 * figures['seconds']:.3g} ms, {figures['bytes_s'] / 1e9:.3g} GB/s; with the copies of gradients before "
        f"and after it {1e3 * figures['with_copies']:.3g} ms"
    )


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"


def gigabytes(size: float | None) -> str:
    return "-" if size is None else f"{size / 1e9:.3g}"
