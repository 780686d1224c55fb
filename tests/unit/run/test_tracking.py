"""The log of metrics: a line a step, and what a resumed run keeps of it."""

import json
import math
from datetime import UTC, datetime
from pathlib import Path

import pytest
from PIL import Image

from gerl.errors import GerlError
from gerl.run.tracking import MetricsLog, best_step, parse_row, read_metrics, series


def test_one_valid_json_object_per_step(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "run")
    log.log(0, {"val/reward/mean": 0.5})
    log.log(1, {"reward/mean": math.nan, "actor/kl": math.inf, "actor/lr": 1})
    path = tmp_path / "run" / "metrics.jsonl"
    lines = path.read_text().splitlines()  # before close: every line is flushed

    rows = [json.loads(line, parse_constant=pytest.fail) for line in lines]  # a NaN is no JSON
    times = [datetime.fromisoformat(row["time"]) for row in rows]
    assert times[0] <= times[1] <= datetime.now(UTC)
    assert [{name: value for name, value in row.items() if name != "time"} for row in rows] == [
        {"step": 0, "val/reward/mean": 0.5},
        {"step": 1, "reward/mean": None, "actor/kl": None, "actor/lr": 1.0},
    ]
    assert all(next(iter(row)) == "step" for row in rows)
    with pytest.raises(ValueError, match=r"step 1 .*step 1: merge"):
        log.log(1, {"val/reward/mean": 0.6})
    log.close()
    log.close()
    assert read_metrics(path) == rows


def test_resume_cuts_repeated_and_torn_lines(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    for step in range(5):
        log.log(step, {"x": step / 3})
    log.close()
    path = tmp_path / "metrics.jsonl"
    before = path.read_text().splitlines()
    with path.open("a") as file:
        file.write('{"step": 5, "x": 1.')
    assert [row["step"] for row in read_metrics(path)] == [0, 1, 2, 3, 4]
    log = MetricsLog(tmp_path, start_step=2)
    assert path.read_text().splitlines() == before[:3]
    log.log(3, {"x": 9.0})
    log.close()
    assert [row["x"] for row in read_metrics(path)] == [0.0, 1 / 3, 2 / 3, 9.0]


def test_read_metrics_names_a_bad_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_metrics(path) == []
    path.write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(GerlError, match=r"metrics\.jsonl, line 2.*remove"):
        read_metrics(path)
    path.write_bytes(b'{"step": 1}\n\0\0\0')
    assert read_metrics(path) == [{"step": 1}]


def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(GerlError, match=r"run .*choose another folder"):
        MetricsLog(tmp_path / "run")


def test_a_folder_that_is_deleted_while_the_run_writes_to_it(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "run")
    log.log(1, {"x": 1})
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    with pytest.raises(GerlError, match=r"run/metrics\.jsonl is gone.* step 2.*deleted or moved"):
        log.log(2, {"x": 1})
    log.close()


def test_an_image_is_named_after_its_step(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    path = log.image(3, "train", Image.new("RGB", (8, 4), (255, 0, 0)))
    log.close()
    assert path == tmp_path / "samples" / "train_000003.png" and Image.open(path).size == (8, 4)


def test_the_best_step_is_the_last_of_the_highest_held_out_rewards() -> None:
    rows = [{"step": step, "val/reward/mean": value} for step, value in ((0, 0.1), (2, 0.4), (4, 0.4), (6, None))]
    x, y = series([*rows, {"step": 7}], "val/reward/mean")
    assert x.tolist() == [0, 2, 4, 6] and y[:3].tolist() == [0.1, 0.4, 0.4] and math.isnan(y[3])
    assert best_step(rows) == (4, 0.4) and best_step(rows[:1]) is None


def test_a_row_of_metrics_has_a_step_a_time_and_numbers() -> None:
    row = '{"step": 1, "time": "now", "a": "x", "b": [1], "c": 1e999, "d": NaN, "e": 2, "f": null, "g": true}'
    assert parse_row(row) == {"step": 1, "time": "now", "c": None, "d": None, "e": 2, "f": None}
    damaged = [
        "",
        "[]",
        "{}",
        '{"step": "1"}',
        '{"step": 1e999}',
        f'{{"step": {2**70}}}',
        '{"step": 1, "a": "\\ud800"}',
    ]
    assert [parse_row(line) for line in damaged] == [None] * len(damaged)
