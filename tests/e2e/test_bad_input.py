"""A scorer that fails or is not installed, a pipeline with a part missing. More is in `test_wrong_inputs.py`."""

import json
import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny

ROOT = Path(__file__).resolve().parents[2]
Refused = Callable[..., str]
Failing = Callable[..., dict[str, Any]]
Train = Callable[..., Any]


def test_a_pipeline_with_a_missing_part(refused: Refused, tmp_path: Path) -> None:
    tiny.sd3(layers=1).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "vae" / "config.json").unlink()
    assert f"model.path='{tmp_path / 'model'}' " in refused(model__path=tmp_path / "model")


def test_a_scorer_that_is_not_installed(refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rapidocr", None)
    message = refused("reward.scorers.ocr.weight=1")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert "rapidocr" in message and any(f"pip install 'gerl[{extra}]'" in message for extra in extras), message
    assert not (tmp_path / "run").exists()


# Scorers that fail on the first image of every group of the prompt "blue", and the reason that is given.
FAILING = {
    "nan": ("return [float('nan') if i == 0 else 0.1 * i for i in range(len(prompts))]", "nan"),
    "raise": (
        "raise RuntimeError('out of\\nmemory')",
        "RuntimeError: out of memory .*failing.py, line 9: raise RuntimeError",
    ),
    "count": ("return [0.5] * (len(prompts) + 1)", "length 5 for 4 images, expected one score each"),
    "nothing": ("return None", "returned None, expected a list with one number per image, .*failing.py, line 4"),
    "text": ("return ['good'] * len(prompts)", "'good'"),
}
SCORER = """
import pathlib

def compute_score(images, prompts, metadata, log, until):
    calls = pathlib.Path(log)
    count = calls.stat().st_size if calls.exists() else 0
    calls.write_text("x" * (count + 1))
    if "blue" in prompts and count < until:
        BODY
    return [0.1 * i for i in range(len(prompts))]
"""


@pytest.fixture
def failing(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Keys of a run with a group of four per prompt, one micro-batch each, of which the scorer fails for one."""

    def keys(kind: str, prompts: str = "blue\na red fox\n", until: int = 10**9) -> dict[str, Any]:
        (tmp_path / "failing.py").write_text(SCORER.replace("BODY", FAILING[kind][0]))
        (tmp_path / "prompts.txt").write_text(prompts)
        return {
            "scorer": tmp_path / "failing.py",
            "data__train": tmp_path / "prompts.txt",
            "reward__scorers__bright__kwargs": f"{{log: {tmp_path / 'calls'}, until: {until}}}",
            "reward__retries": 0,
            "reward__trial": "false",  # it fails in the run
        }

    return keys


@pytest.mark.parametrize("kind", FAILING)
def test_the_group_of_a_failed_score_is_dropped_and_named(
    train: Train, failing: Failing, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    run = train(tmp_path / "run", **failing(kind))
    assert run.column("group/dropped") == [1, 1]
    assert run.column("reward/failures") == ([1, 1] if kind == "nan" else [4, 4])
    assert run.column("actor/policy_version") == [1, 2]  # the other group is trained on
    kept = [0.0, 0.1, 0.2, 0.3] + ([0.1, 0.2, 0.3] if kind == "nan" else [])
    assert run.column("reward/mean") == pytest.approx([sum(kept) / len(kept)] * 2)  # no silent 0
    dropped = [message for message in caplog.messages if "dropped" in message]
    assert len(dropped) == 2
    assert all(re.search(f"bright .*image 0 of 'blue': .*{FAILING[kind][1]}", message) for message in dropped), dropped


def test_a_failed_call_is_retried(
    train: Train, failing: Failing, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = train(tmp_path / "run", trainer__steps=1, **failing("raise", until=3) | {"reward__retries": 2})
    assert run.column("group/dropped") == [0]
    again = [message for message in caplog.messages if re.search("bright .*again.*4 of 4.*out of memory", message)]
    assert len(again) == sum(run.column("scorer/bright/retries")) == 2


def test_a_failed_score_may_stop_the_run_with_a_checkpoint(
    refused: Refused, failing: Failing, run_of: Any, tmp_path: Path
) -> None:
    keys = failing("raise", prompts="a red fox\nx y\nblue\nseven\n")
    message = refused("data.shuffle=false", "logger.report=true", reward__on_error="stop", **keys)
    assert re.search("bright .*image 0 of 'blue': .*out of memory.*reward.on_error=drop_group", message), message
    run = run_of(tmp_path / "run")
    assert run.metrics[-1]["step"] == 1  # the first step had no failure
    state = json.loads((run.checkpoint(1) / "state.json").read_text())
    assert state["step"] == 1 and state["finished"] is False
    assert (run.folder / "report.html").exists()


def test_a_step_without_any_score_stops_the_run(refused: Refused, failing: Failing) -> None:
    message = refused(**failing("raise", prompts="blue\n"))
    assert re.search("100% .*step 1 .*reward.max_failed=0.5", message), message
