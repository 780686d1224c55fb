import csv
import json
import math
import re
from collections.abc import Sequence
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gerl.algorithms.planning import plan_validation
from gerl.config import Config
from gerl.errors import DataError
from gerl.evaluate.comparison import (
    ScoredRow,
    SuiteResults,
    compare,
    facts,
    joint,
    measure,
    missing_parts,
    page,
    plan,
    sheets,
    table,
    tasks_of,
    text,
    together,
    write_files,
)
from gerl.evaluate.loras import BASE
from gerl.evaluate.suites import Column, PinnedSuite, PromptFile, Protocol, Published, Suite, Tasks
from gerl.protocol import Prompt
from gerl.rewards.total import TOTAL
from gerl.run.validation import estimate_share, mean_interval

PIXEL = "data:image/png;base64,AA=="


def drawn(variant: str, prompt: int, value: float | None, index: int = 0, **others: float | None) -> ScoredRow:
    failure = "" if value is not None else "ocr: no idea"
    values = {TOTAL: value, "ocr": value, **others}
    return ScoredRow(prompt, f"prompt <{prompt}>", index, 7 * prompt + index, variant, values, failure, PIXEL)


def two(base: Sequence[float | None], lora: Sequence[float | None]) -> list[ScoredRow]:
    """A row for each prompt and variant, the base's first."""
    scores = {BASE: base, "mine": lora}
    return [drawn(variant, i, scores[variant][i]) for i, variant in product(range(len(base)), scores)]


def test_differences_and_wins_are_of_the_same_prompts() -> None:
    result = compare(two([1.0, 2.0, None, 4.0, 5.0], [1.0, 5.0, 9.0, None, 4.0]))[TOTAL]["mine"]
    assert result.mean.mean == (1 + 5 + 9 + 4) / 4 and result.mean.count == 4
    assert result.difference is not None and result.win_rate is not None
    assert result.difference.mean == pytest.approx((0 + 3 - 1) / 3) and result.difference.count == 3
    assert (result.difference.low, result.difference.high) == mean_interval([[0.0, 3.0, -1.0]])
    assert result.win_rate.mean == pytest.approx((0.5 + 1 + 0) / 3)
    assert (result.win_rate.low, result.win_rate.high) == mean_interval([[0.5, 1.0, 0.0]], (0.0, 1.0))


def test_a_gain_on_every_prompt_alike_has_a_narrow_interval_however_much_prompts_differ() -> None:
    base = [float(i % 7) for i in range(50)]
    result = compare(two(base, [value + 0.25 for value in base]))["ocr"]["mine"]
    assert result.mean.high - result.mean.low > 1.0
    assert result.difference is not None and result.difference.mean == 0.25
    assert 0.2 < result.difference.low < 0.25 < result.difference.high < 0.3


def test_scores_that_never_change_have_the_interval_of_the_rest_of_the_column() -> None:
    results = compare(two([0.0] * 4 + [1.0] * 8, [1.0] * 12))["ocr"]
    assert results["mine"].mean.high == 1.0 and 0.7 < results["mine"].mean.low < 0.8
    same = compare(two([0.0, 1.0] * 6, [0.0, 1.0] * 6))["ocr"]["mine"]
    assert same.difference is not None and same.difference.low < -0.2 < 0.2 < same.difference.high


def test_the_intervals_of_several_loras_hold_together() -> None:
    generator, held = np.random.default_rng(0), []
    assert together([BASE, "a"]) == 0.95 and together([BASE, *"abc"]) == pytest.approx(1 - 0.05 / 3)
    for _ in range(100):
        base = generator.normal(size=12)
        scores = {BASE: base} | {name: base + generator.normal(size=12) for name in "abc"}
        results = compare([drawn(name, i, value) for name, own in scores.items() for i, value in enumerate(own)])
        gains = [result.difference for result in results["ocr"].values() if result.difference is not None]
        held.append(all(gain.low <= 0 <= gain.high for gain in gains))
    assert np.mean(held) >= 0.93  # 0.85 with 95 % each
    assert "3 intervals" in (joint(results) or "") and "each has 98.3 %" in (joint(results) or "")
    assert joint(compare(two([1.0], [2.0]))) is None


def test_a_column_may_be_missing_and_come_late() -> None:
    rows = [*two([1.0], [2.0]), drawn(BASE, 1, 1.0, late=3.0), drawn("mine", 1, None)]
    results = compare(rows)
    assert list(results) == [TOTAL, "ocr", "late"] and list(results["late"]) == [BASE, "mine"]
    assert results["late"][BASE].mean.count == 1 and results["late"]["mine"].mean.count == 0


# prompt -> the scores of three images, of the base model and of a LoRA
THREE = {BASE: [[0.0, 0.6, 0.2], [0.9, 0.1, 0.1], [0.3, 0.2, 0.1]], "mine": [[0.7, 0.8, 0.1]] * 2 + [[0.2, 0.6, 0.0]]}


def three() -> list[ScoredRow]:
    places = product(range(3), range(3), THREE)
    return [drawn(variant, i, THREE[variant][i][k], k) for i, k, variant in places]


def test_success_and_the_best_of_several_images_are_compared_prompt_by_prompt() -> None:
    results = compare(three(), {"ocr": 0.5})
    derived = ["success_rate", "best_of_n", "pass_at_1", "pass_at_2", "pass_at_3"]
    assert list(results) == [TOTAL, "total/best_of_n", "ocr", *(f"ocr/{name}" for name in derived)]
    for name, best in (("best_of_n", max), ("success_rate", lambda own: sum(v >= 0.5 for v in own) / 3)):
        each = {variant: [best(own) for own in scores] for variant, scores in THREE.items()}
        gains = [after - before for before, after in zip(*each.values(), strict=True)]
        result = results[f"ocr/{name}"]["mine"]
        assert result.mean.mean == pytest.approx(np.mean(each["mine"])) and result.mean.count == 3
        assert result.difference is not None and result.difference.mean == pytest.approx(np.mean(gains))
        assert (result.difference.low, result.difference.high) == pytest.approx(mean_interval([gains]))
        assert results[f"ocr/{name}"][BASE].difference is None
    for variant, scores in THREE.items():
        for k in (1, 2, 3):
            naive = [np.mean([max(c) >= 0.5 for c in combinations(own, k)]) for own in scores]
            assert results[f"ocr/pass_at_{k}"][variant].mean.mean == pytest.approx(np.mean(naive))
    assert results["ocr/pass_at_3"]["mine"].mean == estimate_share(range(3), [1.0] * 3)


def test_one_image_per_prompt_has_the_results_it_had() -> None:
    rows = two([0.0, 0.6, 0.2], [0.7, 0.8, 0.1])
    plain = compare(rows)
    assert list(plain) == [TOTAL, "ocr"] and compare(rows, {"gone": 0.5}) == plain
    found = compare(rows, {"ocr": 0.5})
    rate = found.pop("ocr/success_rate")
    assert found == plain
    same = compare(two([1.0] * 8, [1.0] * 8), {"ocr": 0.5})["ocr/success_rate"]["mine"].difference
    assert same is not None and same.low < -0.1 < 0.1 < same.high  # a share may change, also where none has
    assert rate["mine"].mean == estimate_share(range(3), [1.0, 1.0, 0.0])
    assert rate["mine"].win_rate is not None and rate["mine"].win_rate.mean == pytest.approx((1 + 0.5 + 0.5) / 3)


def test_files_and_table_have_the_best_of_several_images(tmp_path: Path) -> None:
    rows, results = three(), compare(three(), {"ocr": 0.5})
    blocks = [block.splitlines()[0] for block in table(results).split("\n\n")]
    assert blocks == [
        "total = ocr",
        "total/best_of_n = ocr/best_of_n",
        "ocr/success_rate",
        "ocr/pass_at_2",
        "ocr/pass_at_3",
    ]
    _, summary, gallery = write_files(tmp_path, "x", rows, results, {})
    written = json.loads(summary.read_text())["results"]
    assert list(written) == list(results)
    assert written["ocr/pass_at_1"]["mine"]["mean"]["mean"] == pytest.approx(5 / 9)
    page_text = gallery.read_text()
    assert page_text.count("<td>ocr/success_rate</td>") == 2 and "ocr/pass_at_1" not in page_text


def test_the_log_has_a_block_for_columns_that_are_the_same() -> None:
    rows = [drawn(v, i, x + i, size=-x) for v, x in ((BASE, 1.0), ("mine", 2.5)) for i in range(3)]
    lines = [line.split() for line in table(compare(rows)).splitlines()]
    assert lines[0] == ["total", "=", "ocr"] and lines[5] == ["size"]
    assert lines[2] == ["base", "2", "-0.4841", "to", "4.484"]
    assert lines[3] == "mine 3.5 1.016 to 5.984 +1.5 -1.682 to +3.482 100 %".split()
    assert lines[8][:2] == ["mine", "-2.5"] and lines[8][-2:] == ["0", "%"]


def test_the_files_hold_every_number(tmp_path: Path) -> None:
    rows = [*two([0.1 + 0.2, 1.0], [None, 1 / 3]), drawn(BASE, 2, 0.0, 1), drawn("mine", 2, 0.0, 1)]
    results = compare(rows)
    written = write_files(tmp_path, "x", rows, results, {"model": "signs"}, remarks=["one sentence"])
    assert [path.name for path in written] == ["scores.csv", "summary.json", "gallery.html"]
    with written[0].open(newline="") as file:
        cells = list(csv.DictReader(file))
    assert list(cells[0]) == ["prompt_id", "image", "seed", "variant", "prompt", "total", "ocr", "failure"]
    assert float(cells[0]["total"]) == 0.1 + 0.2 and cells[1]["total"] == "" and cells[1]["failure"] == "ocr: no idea"
    assert [list(cell.values())[:4] for cell in cells[-2:]] == [["2", "1", "15", variant] for variant in (BASE, "mine")]
    summary = json.loads(written[1].read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert summary["model"] == "signs" and summary["results"]["total"]["base"]["difference"] is None
    assert summary["remarks"] == ["one sentence"] and "one sentence" in written[2].read_text()
    mine = summary["results"]["total"]["mine"]
    assert mine["difference"]["mean"] == pytest.approx((1 / 3 - 1) / 2) and mine["win_rate"]["count"] == 2


def test_the_page_has_a_row_for_each_noise_sorted_by_what_was_gained(tmp_path: Path) -> None:
    Image.new("RGB", (4, 4), (255, 0, 0)).save(tmp_path / "given.png")
    rows = two([1.0, 0.5, 0.0], [1.5, 1.5, None])
    rows = [
        ScoredRow(**{**vars(row), "given": (str(tmp_path / "given.png"),)}) if row.prompt_id else row for row in rows
    ]
    text = page("a & b", rows, compare(rows))
    assert "<title>gerl: a &amp; b</title>" in text and "let chosen = 1, " in text
    values = [json.loads(found) for found in re.findall(r'data-values="([^"]*)"', text)]
    assert values == [[0.5, 1.0], [1.0, 0.5], [0.0, None]]  # the total and the only scorer are one column
    headings = re.findall(r"<h2>(.*?)</h2>", text)
    assert headings == ["Scores", *(f"prompt &lt;{i}&gt;" for i in (1, 0, 2))]
    assert text.count('<button type="button" class="sort"') == 2 and text.count('aria-pressed="true">') == 1
    assert text.count('alt="given with the prompt"') == 2 and text.count("data:image/png;base64,AA==") == 6
    assert text.count("</div>") == text.count("<div") and "ocr: no idea" in text
    assert "total = ocr" in text
    alone = page("a", rows[::2], compare(rows[::2]))  # the base and nothing else: by its scores
    assert "let chosen = 0, " in alone and re.findall(r"prompt &lt;(\d)&gt;</h2>", alone) == ["0", "1", "2"]


def test_the_first_image_has_the_noise_of_the_trainers_validation() -> None:
    prompts = [Prompt(i, f"prompt {i}") for i in range(5)]
    (batch, *_) = batches = plan_validation(Config(), prompts, 0)
    assert len(batches) == 1
    tasks = plan(batch, [BASE, "mine"], images=3)
    numbers = [(variant, [s.index for s in samples]) for variant, samples in tasks]
    assert numbers == [(variant, [k] * 5) for k in range(3) for variant in (BASE, "mine")]
    seeds = {variant: [s.seed for v, samples in tasks if v == variant for s in samples] for variant in (BASE, "mine")}
    assert seeds[BASE] == seeds["mine"] and len(set(seeds[BASE])) == 15
    assert seeds[BASE][:5] == [sample.seed for sample in batch]
    groups = [{s.group for s in samples} for _, samples in tasks]
    assert groups[0] == groups[2] and not groups[0] & groups[1]  # scorers compare images of one variant only


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
PINNED = PinnedSuite("mine", SUITE, "p", False, Path("mine.jsonl"), (), ("X: give its address",))
TASKS = {0: "even", 1: "even", 2: "even", 3: "odd"}
# prompt -> the scores of its two images
SCORES = {BASE: [(0.0, 0.2), (0.3, 0.3), (0.4, 0.6), (0.9, 0.7)], "mine": [(0.5, 0.5)] * 3 + [(1.0, 1.0)]}


def rows(**missing: float) -> list[ScoredRow]:
    found = []
    for variant, prompt, index in product(SCORES, range(4), range(2)):
        value = SCORES[variant][prompt][index]
        values = {TOTAL: value, "ocr": value, "ocr/exact": float(value == 1)}
        found.append(ScoredRow(prompt, f"prompt {prompt}", index, 1, variant, values))
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


def test_the_interval_of_a_mean_over_tasks_is_that_of_the_tasks() -> None:
    tasks = {**TASKS, 4: "odd"}
    more = [ScoredRow(4, "x", 0, 1, v, {TOTAL: 0.5, "ocr": 0.5, "ocr/exact": 0.0}) for v in SCORES]
    found = {(m.column, m.variant, m.task): m for m in measure(SUITE, tasks, [*rows(), *more])}
    mean = found["ocr", BASE, None].mean
    assert (mean.low, mean.high) == pytest.approx(mean_interval([[1.0, 3.0, 5.0], [8.0, 5.0]], (0.0, 10.0)))
    alone = {(m.column, m.variant, m.task): m for m in measure(SUITE, TASKS, rows())}
    assert math.isnan(alone["ocr", BASE, None].mean.low)  # a task of one prompt


def test_a_prompt_of_no_task_is_refused() -> None:
    assert tasks_of(SUITE, [Prompt(3, "x", {"kind": "odd"})]) == {3: "odd"}
    with pytest.raises(DataError, match="kind=zzz, expected one of even, odd, none"):
        tasks_of(SUITE, [Prompt(0, "x", {"kind": "zzz"})])


def test_what_was_left_out_is_said() -> None:
    assert missing_parts(PINNED, TASKS, rows()) == ["no prompt of none"]
    part = [row for row in rows() if row.prompt_id < 2]
    assert missing_parts(PINNED, TASKS, part) == ["2 of 4 prompts", "no prompt of odd, none"]
    part[0].values["ocr"] = None
    assert "1 of 8 images without OCR" in missing_parts(PINNED, TASKS, part)


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
    assert gallery.index("<h2>Scores</h2>") < gallery.index("suite mine, with deviations")
    assert gallery.index("suite mine, with deviations") < gallery.index("published, not measured here")
    for sentence in ("DEVIATION, not the published protocol: images=1 (pinned: 2)", "differs in gerl: the noise is"):
        assert sentence in gallery and sentence in text(results)
    assert "not measured: X: give its address" in text(results)
    assert json.loads((tmp_path / "summary.json").read_text())["suite"]["prompts"]["licence"] == "CC0"


def test_a_column_that_was_not_scored_is_left_out() -> None:
    bare = [ScoredRow(0, "x", 0, 1, BASE, {TOTAL: 1.0, "other": 1.0})]
    assert measure(SUITE, {0: "even"}, bare) == []
