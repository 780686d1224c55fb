import csv
import json
import logging
import math
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from html_page import Page

from gerl.config import RewardConfig, ScorerConfig
from gerl.errors import GerlError
from gerl.protocol import Prompt
from gerl.run.validation import wilson_interval
from gerl.score.command import (
    BINS,
    Item,
    ScoredImage,
    closing_screen,
    derived_lines,
    describe_groups,
    groups_of,
    summarise,
    write_gallery,
    write_tables,
)

PIXEL = "data:image/png;base64,AA=="


def card(name: str, total: float | None, failure: str = "", **values: float | None) -> ScoredImage:
    return ScoredImage(Path(name), name, f"prompt of {name}", PIXEL, {"total": total, **values}, failure)


def page(tmp_path: Path, cards: list[ScoredImage], weights: dict[str, float] | None = None) -> tuple[str, Page]:
    write_gallery(tmp_path / "gallery.html", "pictures", cards, weights or {})
    text = (tmp_path / "gallery.html").read_text(encoding="utf-8")
    return text, Page(text)


def test_a_summary_is_of_the_values_there_are() -> None:
    summary = summarise("a", [1.0, None, 2.0, 6.0, 3.0])
    assert (summary.name, summary.count, summary.low, summary.high) == ("a", 4, 1.0, 6.0)
    assert (summary.mean, summary.median) == (3.0, 2.5)
    assert summary.std == pytest.approx(math.sqrt(((1 - 3) ** 2 + (2 - 3) ** 2 + (6 - 3) ** 2 + 0) / 4))
    assert len(summary.bins) == BINS and sum(summary.bins) == 4 and summary.bins[0] == summary.bins[-1] == 1


@pytest.mark.parametrize("values", [(0.0, 0.0), (-3.0, -3.0), (1e300, 1e300), (1.0, np.nextafter(1.0, 2.0))])
def test_equal_values_have_no_histogram(values: tuple[float, float]) -> None:
    summary = summarise("a", values)
    assert summary.bins == [] and summary.count == 2 and (summary.low, summary.high) == values


def test_a_column_without_values_has_no_statistics() -> None:
    summary = summarise("a", [None, None])
    assert summary.count == 0 and summary.bins == [] and math.isnan(summary.mean) and math.isnan(summary.high)


def test_the_best_come_first_and_what_has_no_total_last(tmp_path: Path) -> None:
    cards = [card("b", 0.0), card("none", None, "x: broke"), card("c", -1.0), card("a", 2.0)]
    _, seen = page(tmp_path, cards)
    assert seen.values == [[2.0], [0.0], [-1.0], [None]]
    prompts = [word.removeprefix("prompt of ") for word in seen.words if word.startswith("prompt of ")]
    assert prompts == ["a", "b", "c", "none"]


def test_success_rates_and_the_best_of_several_images_have_lines_of_their_own(tmp_path: Path) -> None:
    values = [0.1, 0.9, 0.5, 0.6, 0.2]
    cards = [card(str(i), value, ocr=value, size=1.0) for i, value in enumerate(values)]
    reward = RewardConfig({"ocr": ScorerConfig(success=0.5), "size": ScorerConfig(weight=0)})
    lines = derived_lines(reward, cards, [0, 0, 1, 1, 2])  # a third prompt with one image
    numbers = {name: [float(cell) for cell in cells[:2]] for name, *cells in lines}
    assert numbers == {
        "total/best_of_n = ocr/best_of_n": [2, 0.75],
        "ocr/success_rate": [3, 0.5],
        "ocr/pass_at_2": [2, 1.0],
        "size/best_of_n": [2, 1.0],
    }
    screen = closing_screen(tmp_path, cards, lines)
    assert sum(line.startswith("ocr/success_rate ") for line in screen.splitlines()) == 1
    write_gallery(tmp_path / "gallery.html", "x", cards, {}, lines)
    assert "ocr/success_rate" in (tmp_path / "gallery.html").read_text()
    apart = derived_lines(reward, cards, range(5))  # one image each: how many are good enough, and nothing else
    low, high = wilson_interval(0.6, 5)
    assert apart == [("ocr/success_rate", "5", "0.6", f"{low:.4g} to {high:.4g}")]


def test_the_page_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    text, seen = page(tmp_path, [card("a", 1.0)])
    assert seen.loaded == [PIXEL] and "default-src 'none'" in text


def test_prompts_names_and_reasons_are_shown_as_text(tmp_path: Path) -> None:
    evil = '"><script>alert(1)</script>&<b>'
    cards = [ScoredImage(Path(evil), evil, evil, PIXEL, {"total": None, evil: 1.0}, evil)]
    text, seen = page(tmp_path, cards)
    assert text.count("<script>") == 1 and "<b>" not in text
    assert seen.words.count(evil) == 5  # table, prompt, name, reason, column


def test_failures_weights_and_missing_scores_are_shown(tmp_path: Path) -> None:
    _, seen = page(tmp_path, [card("a", 1.0, x=4.0), card("b", None, "x: broke", x=None)], {"x": 0.25})
    assert "x: broke" in seen.words and "0.25" in seen.words and seen.words.count("not scored") == 2
    assert any("2 images, 1 without a total" in word for word in seen.words)


def test_a_single_scorer_is_one_column_and_a_weight_of_0_is_shown(tmp_path: Path) -> None:
    cards = [card("a", 1.0, ocr=1.0, size=5.0), card("b", 0.0, ocr=0.0, size=6.0)]
    text, seen = page(tmp_path, cards, {"ocr": 1.0, "size": 0.0})
    buttons = re.findall(r'class="sort"[^>]*>([^<]*)<', text)
    assert buttons == ["total = ocr", "size"] and seen.values == [[1.0, 5.0], [0.0, 6.0]]
    assert [re.findall(rf">{name}</button></td>\s*<td>([^<]*)<", text) for name in buttons] == [["1"], ["0"]]
    assert '<th class="bars">min to max</th>' in text and text.count('<td class="bars">') == 2


def test_the_histogram_counts_every_image(tmp_path: Path) -> None:
    values = [0.0, 0.0, 0.0, 0.5, 1.0]
    _, seen = page(tmp_path, [card(str(i), value) for i, value in enumerate(values)])
    assert seen.bars == [3, 1, 1]


STUB = """
const fs = require("fs");
const given = JSON.parse(fs.readFileSync(0, "utf8"));
const gallery = { children: given.values.map((v, i) => ({ i, dataset: { values: v } })) };
gallery.append = (...nodes) => { gallery.children = nodes; };
const buttons = given.clicks[0].map(() => ({ setAttribute() {}, addEventListener(_, f) { this.click = f; } }));
global.document = { querySelector: () => gallery, querySelectorAll: () => buttons };
(0, eval)(given.script);
const order = (k) => { buttons[k].click(); return gallery.children.map((card) => card.i); };
console.log(JSON.stringify(given.clicks[1].map(order)));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node to run the page's script")
def test_a_click_sorts_by_the_column_and_a_second_one_turns_it_around(tmp_path: Path) -> None:
    cards = [card("a", 3.0, x=None), card("b", 2.0, x=-5.0), card("c", 1.0, x=7.0), card("d", None, x=0.5)]
    text, seen = page(tmp_path, cards)
    script = re.search(r"<script>(.*)</script>", text, re.DOTALL)
    assert script is not None
    values = [json.dumps(row) for row in seen.values]
    given = {"values": values, "script": script[1], "clicks": [["total", "x"], [1, 1, 0, 0]]}
    ran = subprocess.run(["node", "-e", STUB], input=json.dumps(given), capture_output=True, text=True, check=True)
    assert json.loads(ran.stdout) == [[2, 3, 1, 0], [1, 3, 2, 0], [0, 1, 2, 3], [2, 1, 0, 3]]


def test_the_tables_hold_every_value_as_it_is(tmp_path: Path) -> None:
    cards = [card('a, "b"', 0.1 + 0.2, x=1.0), card("b", None, "x: broke,\nbadly", x=None)]
    write_tables(tmp_path, cards)
    rows = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    assert [list(row) for row in rows] == [["image", "prompt", "total", "x", "failure"]] * 2
    assert rows[0]["total"] == 0.1 + 0.2 and rows[0]["failure"] is None
    assert rows[1]["total"] is None and rows[1]["failure"] == "x: broke,\nbadly"
    with (tmp_path / "scores.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [row["image"] for row in table] == [row["image"] for row in rows] == [str(c.path.absolute()) for c in cards]
    assert float(table[0]["total"]) == 0.1 + 0.2 and table[1]["total"] == table[1]["x"] == ""
    assert [row["failure"] for row in table] == ["", "x: broke,\nbadly"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(GerlError, match="nowhere"):
        write_gallery(tmp_path / "nowhere" / "gallery.html", "x", [], {})
    with pytest.raises(GerlError, match="nowhere"):
        write_tables(tmp_path / "nowhere", [])


def items(*rows: tuple[str, dict[str, object]]) -> list[Item]:
    return [Item(Path(f"{i}.png"), f"{i}.png", Prompt(i, text, row)) for i, (text, row) in enumerate(rows)]


A, B = {"source": "a.png"}, {"source": "b.png", "turn": [1, {"x": 2}]}


def test_images_are_compared_whose_prompts_are_equal_in_text_and_columns(caplog: pytest.LogCaptureFixture) -> None:
    found = items(("edit", A), ("edit", B), ("other", A), ("edit", dict(A)), ("edit", dict(reversed(B.items()))))
    groups = groups_of(found)
    assert groups == [[0, 3], [1, 4], [2]]
    with caplog.at_level(logging.INFO):
        describe_groups(found, groups, {"diversity"})
    assert "same source, turn: 3 groups of 1 to 2 images" in caplog.text and caplog.records[0].levelname == "INFO"


def test_a_column_that_keeps_all_images_apart_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    found = items(("a", {"seed": 1}), ("a", {"seed": 2}))
    describe_groups(found, groups_of(found), {"diversity"})
    assert "no two have the same seed" in caplog.text and caplog.records[0].levelname == "WARNING"
