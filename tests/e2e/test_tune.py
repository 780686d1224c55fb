"""A search over presets and rates with real trials: what it finds can be trained again, a failed preset is named."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from drills import more

from gerl.commandline.composition import compose_run
from gerl.trainer.tune import main


@more
def test_a_search_ends_with_a_lora_a_report_and_an_experiment(
    arguments: Callable[..., list[str]], workplace: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = arguments(tmp_path, validation__data=workplace / "val.txt")
    left_out = ("trainer.steps=", "hydra.run.dir=", "algorithm=", "validation.every=", "checkpoint.every=")
    keys = [key for key in given if not key.startswith(left_out)]
    searched = ["evaluations=1200", "presets=flow_grpo,refl", "rates=1e-3,1e-2", f"out={tmp_path / 'found'}"]
    assert main([*searched, *keys]) == 0
    found = json.loads((tmp_path / "found" / "tune.json").read_text())["results"]
    by_name = {(row["preset"], row["rate"], row["round"]): row for row in found}
    assert "no gradient" in by_name["refl", "1e-3", 0]["error"]
    last = max(found, key=lambda row: row["round"])
    assert last["round"] == 2 and sum(row["cost"] for row in found) == pytest.approx(1200, rel=0.3)
    assert last["lr"] < float(last["rate"])  # it trains longer than in the first round
    best = max((row for row in found if row["reward"] is not None), key=lambda row: (row["reward"], row["round"]))
    trial = tmp_path / "found" / "trials" / f"{best['round']}_flow_grpo_{best['rate']}"
    assert (trial / "checkpoints" / f"step_{best['steps']}" / "lora").is_dir() and (trial / "metrics.jsonl").exists()
    again: Any = compose_run([f"experiment={tmp_path / 'found' / 'best.yaml'}"]).config
    assert (again.trainer.steps, again.actor.lr) == (best["steps"], best["lr"])
    assert "refl" in (tmp_path / "found" / "report.html").read_text()
    assert "best: flow_grpo" in caplog.text
