"""Coverage: every pipeline of the zoo passes its checks, and the pages say so."""

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from drills import PIPELINES, sampled
from zoo import conditioned
from zoo.base import Entry
from zoo.checks import Report, check_entry
from zoo.entries import ENTRIES, name_of

ROOT = Path(__file__).resolve().parents[2]
PAGE, MATRIX = ROOT / "docs" / "models.md", ROOT / "benchmarks" / "pipelines.md"
BEGIN, END = "<!-- written by tests/e2e/test_zoo.py: begin -->\n", "<!-- end -->"
pytestmark = pytest.mark.filterwarnings("ignore")  # diffusers' own, on its older modules
REPORTS: dict[tuple[str, str], Report] = {}


@pytest.mark.parametrize("entry", [e for e in ENTRIES if sampled(name_of(e), PIPELINES)], ids=name_of)
def test_a_pipeline_of_diffusers(entry: Entry) -> None:
    REPORTS[entry.name, entry.task] = check_entry(entry)


PICTURED = [e for e in conditioned.ENTRIES if e.batch == 4 and sampled(name_of(e), PIPELINES)]


@pytest.mark.parametrize("entry", PICTURED, ids=lambda e: e.name)
def test_the_pictures_of_one_prompt_for_all_samples_of_it(entry: Entry) -> None:
    def once(_: int) -> dict[str, Any]:
        given = entry.inputs(1) if entry.inputs else {}
        return {name: value[0] if len(value) == 1 else value for name, value in given.items()}

    each = entry.name == "StableDiffusion3Img2ImgPipeline"  # which wants as many pictures as prompts
    check_entry(replace(entry, batch=2, cfg=None, inputs=entry.inputs if each else once))


def test_there_are_at_least_forty_pipelines() -> None:
    assert len({(e.name, e.task) for e in ENTRIES}) == len(ENTRIES)
    assert len(ENTRIES) >= 40
    assert all(e.limit for e in ENTRIES if e.fails)


def test_the_pages_name_every_pipeline_and_every_limit() -> None:
    short, _, limits = PAGE.read_text().partition("## What a pipeline needs")[0].partition("\nLimits:\n")
    listed = re.findall(r"`(\w+Pipeline)`", " ".join(re.findall(r"^\| .*", short, re.M)))
    trained = {e.name for e in ENTRIES}
    assert sorted(listed) == sorted(trained) and f"These {len(trained)} pipelines" in short
    limited = {e.name for e in ENTRIES if e.limit or e.fails or e.batch == 1}
    assert set(re.findall(r"`(\w+Pipeline)`", " ".join(re.findall(r"^\| ([^|]*)", limits, re.M)))) == limited
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", MATRIX.read_text(), re.M)
    assert rows == [(e.name, e.task) for e in ENTRIES], "a run of all of this file writes it"


def test_the_table_of_the_models() -> None:
    if len(REPORTS) < len(ENTRIES):
        pytest.skip("the table is written by a run of all of this file that passes")
    text = MATRIX.read_text()
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    new = before + BEGIN + table([REPORTS[e.name, e.task] for e in ENTRIES]) + END + after
    if new != text and os.access(MATRIX, os.W_OK):
        MATRIX.write_text(new)


def table(reports: list[Report]) -> str:
    """A row for each pipeline. Nothing in it depends on the machine."""
    rows = [
        "pipeline | task | scheduler | guidance | `algorithm.cfg` | sub-batches | without encoders | limit",
        " | ".join(["---"] * 8),
    ]
    rows += [" | ".join([f"`{r.entry.name}`", r.entry.task, r.scheduler, *results(r), r.entry.limit]) for r in reports]
    return "".join(f"| {row} |\n" for row in rows)


def results(report: Report) -> tuple[str, str, str, str]:
    """Guidance, its modes in the update, sub-batches and encoders, in words."""
    entry, plain, guided = report.entry, report.passed.get(False, []), report.passed.get(True)
    guidance = "off" if guided is None else "on and off" if "replay" in guided else "off only"
    tried = [plain] if guided is None or "replay" not in guided else [plain, guided]
    together = "one prompt a call" if entry.batch == 1 else "whole batch only"
    sub_batches = "yes" if all("micro_batch" in passed for passed in tried) else together
    encoders = "yes" if all("encoders" in passed for passed in tried) else "has none"
    encoders = "no" if "encoders" in entry.fails else encoders
    return guidance, ", ".join(report.modes), sub_batches, encoders
