"""The numbers of a suite against closed forms, and its report."""

import json
import math
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from gerl.errors import DataError
from gerl.evaluate.comparison import Drawn, compare
from gerl.evaluate.files import write_files
from gerl.evaluate.names import BASE
from gerl.evaluate.suite_results import SuiteResults, facts, measure, sheets, tasks_of, text, unfinished
from gerl.evaluate.suites import Column, Pinned, PromptFile, Protocol, Published, Suite, Tasks
from gerl.protocol import Prompt
from gerl.rewards.total import TOTAL
from gerl.run.validation import bootstrap, bootstrap_groups

SUITE = Suite(
    title="Signs",
    source="a test",
    prompts=PromptFile("a test", "mine.jsonl", 4, "CC0", sha256="0" * 64),
    scorers={"ocr": {"weight": 1.0}},
    columns={"ocr": Column("OCR", "tasks", 10.0), "ocr/exact": Column("exact")},
    tasks=Tasks("kind", ("even", "odd", "none")),
    protocols={"p": Protocol("a script", ("m*",), 2, {})},
    differs=("the noise is another",),
    published=(Published("M", "a paper", {"ocr": 77.5}, "Their-GRPO", {"odd": 66.25}),),
)
PINNED = Pinned("mine", SUITE, "p", False, Path("mine.jsonl"), (), ("X: give its address",))
TASKS = {0: "even", 1: "even", 2: "even", 3: "odd"}
# prompt -> the scores of its two images
SCORES = {BASE: [(0.0, 0.2), (0.3, 0.3), (0.4, 0.6), (0.9, 0.7)], "mine": [(0.5, 0.5)] * 3 + [(1.0, 1.0)]}


def rows(**missing: float) -> list[Drawn]:
    found = []
    for variant, prompt, index in product(SCORES, range(4), range(2)):
        value = SCORES[variant][prompt][index]
        values = {TOTAL: value, "ocr": value, "ocr/exact": float(value == 1)}
        found.append(Drawn(prompt, f"prompt {prompt}", index, 1, variant, values))
    return found


def test_the_mean_over_tasks_is_that_of_the_tasks_whatever_their_sizes() -> None:
    found = {(m.column, m.variant, m.task): m for m in measure(SUITE, TASKS, rows())}
    even, odd = (0.1 + 0.3 + 0.5) / 3, 0.8
    assert found["ocr", BASE, "even"].mean.mean == pytest.approx(10 * even)
    assert found["ocr", BASE, "odd"].mean.mean == pytest.approx(10 * odd)
    assert found["ocr", BASE, None].mean.mean == pytest.approx(10 * (even + odd) / 2)
    assert found["ocr", BASE, None].mean.count == 4 and found["ocr", BASE, "even"].mean.count == 3
    gain = found["ocr", "mine", None].difference
    assert gain is not None and gain.mean == pytest.approx(10 * ((0.5 - even) + (1.0 - odd)) / 2)
    assert ("ocr", BASE, "none") not in found  # no prompt is of it
    assert found["ocr/exact", "mine", None].mean.mean == pytest.approx(0.25)  # over prompts, and not by task
    assert ("ocr/exact", "mine", "odd") not in found


def test_the_interval_of_a_mean_over_tasks_resamples_each_task() -> None:
    generator = np.random.default_rng(5)
    groups = [generator.normal(0, s, n) for s, n in ((1.0, 400), (3.0, 100))]
    low, high = bootstrap_groups([list(group) for group in groups], confidence=0.8)
    deviation = math.sqrt(sum(group.var() / len(group) for group in groups)) / 2
    centre = np.mean([group.mean() for group in groups])
    assert low == pytest.approx(centre - 1.2816 * deviation, abs=0.06 * deviation)
    assert high == pytest.approx(centre + 1.2816 * deviation, abs=0.06 * deviation)
    assert bootstrap_groups([list(groups[0])]) == bootstrap(list(groups[0]))


def test_a_prompt_of_no_task_is_refused() -> None:
    assert tasks_of(SUITE, [Prompt(3, "x", {"kind": "odd"})]) == {3: "odd"}
    with pytest.raises(DataError, match="kind=zzz, expected one of even, odd, none"):
        tasks_of(SUITE, [Prompt(0, "x", {"kind": "zzz"})])


def test_what_was_left_out_is_said() -> None:
    assert unfinished(PINNED, TASKS, rows()) == ["no prompt of none"]
    part = [row for row in rows() if row.prompt_id < 2]
    assert unfinished(PINNED, TASKS, part) == ["2 of 4 prompts", "no prompt of odd, none"]
    part[0].values["ocr"] = None
    assert "1 of 8 images without OCR" in unfinished(PINNED, TASKS, part)


def test_published_rows_stand_apart_from_measured_ones(tmp_path: Path) -> None:
    drawn = rows()
    results = SuiteResults(PINNED, tuple(measure(SUITE, TASKS, drawn)), ("images=1 (pinned: 2)",))
    measured, published = sheets(results)
    assert not any("77.5" in cell or "66.25" in cell for line in measured.lines for cell in line)
    assert published.head[0] == "published, not measured here"
    assert published.lines == [("M", "Their-GRPO", "77.5", "-", "-", "66.25", "-", "[1]")]
    assert published.remarks == ["[1] a paper"]
    said = facts(results)
    assert "77.5" not in json.dumps(said["measured"]) and "77.5" in json.dumps(said["published"])
    assert said["deviations"] == ["images=1 (pinned: 2)"] and said["protocol_kept"] is False
    write_files(tmp_path, "base and mine", drawn, compare(drawn), {"suite": said}, sheets(results))
    gallery = (tmp_path / "gallery.html").read_text()
    assert gallery.index("suite mine, with deviations") < gallery.index("published, not measured here")
    for sentence in ("DEVIATION, not the published protocol: images=1 (pinned: 2)", "differs in gerl: the noise is"):
        assert sentence in gallery and sentence in text(results)
    assert "not measured: X: give its address" in text(results)
    assert json.loads((tmp_path / "summary.json").read_text())["suite"]["prompts"]["licence"] == "CC0"


def test_a_column_that_was_not_scored_is_left_out() -> None:
    bare = [Drawn(0, "x", 0, 1, BASE, {TOTAL: 1.0, "other": 1.0})]
    assert measure(SUITE, {0: "even"}, bare) == []
