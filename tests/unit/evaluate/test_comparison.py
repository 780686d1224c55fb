import csv
import json
import re
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest
from PIL import Image

from gerl.algorithms.planning import plan_validation
from gerl.config import Config
from gerl.evaluate.comparison import Drawn, compare, plan
from gerl.evaluate.files import narrow, page, table, write_files
from gerl.evaluate.names import BASE
from gerl.protocol import Prompt
from gerl.rewards.total import TOTAL
from gerl.run.validation import bootstrap

PIXEL = "data:image/png;base64,AA=="


def drawn(variant: str, prompt: int, value: float | None, index: int = 0, **others: float | None) -> Drawn:
    failure = "" if value is not None else "ocr: no idea"
    values = {TOTAL: value, "ocr": value, **others}
    return Drawn(prompt, f"prompt <{prompt}>", index, 7 * prompt + index, variant, values, failure, PIXEL)


def two(base: Sequence[float | None], lora: Sequence[float | None]) -> list[Drawn]:
    """A row for each prompt and variant, the base's first."""
    scores = {BASE: base, "mine": lora}
    return [drawn(variant, i, scores[variant][i]) for i, variant in product(range(len(base)), scores)]


def test_differences_and_wins_are_of_the_same_prompts() -> None:
    result = compare(two([1.0, 2.0, None, 4.0, 5.0], [1.0, 5.0, 9.0, None, 4.0]))[TOTAL]["mine"]
    assert result.mean.mean == (1 + 5 + 9 + 4) / 4 and result.mean.count == 4
    assert result.difference is not None and result.win_rate is not None
    assert result.difference.mean == pytest.approx((0 + 3 - 1) / 3) and result.difference.count == 3
    assert (result.difference.low, result.difference.high) == bootstrap([0.0, 3.0, -1.0])
    assert result.win_rate.mean == pytest.approx((0.5 + 1 + 0) / 3)
    assert (result.win_rate.low, result.win_rate.high) == bootstrap([0.5, 1.0, 0.0])


def test_what_is_gained_on_every_prompt_alike_is_certain_however_much_prompts_differ() -> None:
    base = [float(i % 7) for i in range(50)]
    result = compare(two(base, [value + 0.25 for value in base]))["ocr"]["mine"]
    assert result.mean.high - result.mean.low > 1.0
    assert result.difference is not None
    assert (result.difference.low, result.difference.mean, result.difference.high) == (0.25, 0.25, 0.25)


def test_a_column_may_be_missing_and_come_late() -> None:
    rows = [*two([1.0], [2.0]), drawn(BASE, 1, 1.0, late=3.0), drawn("mine", 1, None)]
    results = compare(rows)
    assert list(results) == [TOTAL, "ocr", "late"] and list(results["late"]) == [BASE, "mine"]
    assert results["late"][BASE].mean.count == 1 and results["late"]["mine"].mean.count == 0


def test_the_log_has_a_block_for_columns_that_are_the_same() -> None:
    rows = [drawn(v, i, x + i, size=-x) for v, x in ((BASE, 1.0), ("mine", 2.5)) for i in range(3)]
    lines = [line.split() for line in table(compare(rows)).splitlines()]
    assert lines[0] == ["total", "=", "ocr"] and lines[5] == ["size"]
    assert lines[2] == ["base", "2", "1", "to", "3"]
    assert lines[3] == "mine 3.5 2.5 to 4.5 +1.5 +1.5 to +1.5 100 %".split()
    assert lines[8] == "mine -2.5 -2.5 to -2.5 -1.5 -1.5 to -1.5 0 %".split()


def test_intervals_over_few_prompts_are_said_to_be_too_narrow() -> None:
    few, enough = (compare([drawn(BASE, i, 1.0) for i in range(count)]) for count in (19, 20))
    assert "over 19 prompts" in (narrow(few) or "") and "more prompts" in (narrow(few) or "") and narrow(enough) is None


def test_the_files_hold_every_number(tmp_path: Path) -> None:
    rows = [*two([0.1 + 0.2, 1.0], [None, 1 / 3]), drawn(BASE, 2, 0.0, 1), drawn("mine", 2, 0.0, 1)]
    results = compare(rows)
    written = write_files(tmp_path, "x", rows, results, {"model": "signs"})
    assert [path.name for path in written] == ["scores.csv", "summary.json", "gallery.html"]
    with written[0].open(newline="") as file:
        cells = list(csv.DictReader(file))
    assert list(cells[0]) == ["prompt_id", "image", "seed", "variant", "prompt", "total", "ocr", "failure"]
    assert float(cells[0]["total"]) == 0.1 + 0.2 and cells[1]["total"] == "" and cells[1]["failure"] == "ocr: no idea"
    assert [list(cell.values())[:4] for cell in cells[-2:]] == [["2", "1", "15", variant] for variant in (BASE, "mine")]
    summary = json.loads(written[1].read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert summary["model"] == "signs" and summary["results"]["total"]["base"]["difference"] is None
    mine = summary["results"]["total"]["mine"]
    assert mine["difference"]["mean"] == pytest.approx((1 / 3 - 1) / 2) and mine["win_rate"]["count"] == 2


def test_the_page_has_a_row_for_each_noise_sorted_by_what_was_gained(tmp_path: Path) -> None:
    Image.new("RGB", (4, 4), (255, 0, 0)).save(tmp_path / "given.png")
    rows = two([1.0, 0.5, 0.0], [1.5, 1.5, None])
    rows = [Drawn(**{**vars(row), "given": (str(tmp_path / "given.png"),)}) if row.prompt_id else row for row in rows]
    text = page("a & b", rows, compare(rows))
    assert "<title>gerl: a &amp; b</title>" in text and "let chosen = 1, " in text
    values = [json.loads(found) for found in re.findall(r'data-values="([^"]*)"', text)]
    assert values == [[0.5, 1.0], [1.0, 0.5], [0.0, None]]  # the total and the only scorer are one column
    headings = re.findall(r"<h2>(.*?)</h2>", text)
    assert headings == [f"prompt &lt;{i}&gt;" for i in (1, 0, 2)]
    assert text.count('<button type="button" class="sort"') == 2 and text.count('aria-pressed="true">') == 1
    assert text.count('alt="given with the prompt"') == 2 and text.count("data:image/png;base64,AA==") == 6
    assert text.count("</div>") == text.count("<div") and "ocr: no idea" in text
    assert "total = ocr" in text and "over 2 prompts: below 20 they are too narrow" in text
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
