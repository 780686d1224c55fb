"""`python -m gerl.preflight signal=N`: gradients of independent batches of a run, and what they say."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gerl.preflight.arguments import main

Measure = Callable[..., dict[str, Any]]


@pytest.fixture
def measure(arguments: Callable[..., list[str]], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Measure:
    """Run the command line and return its report, with the text of the terminal as `text`."""

    def run(*overrides: str, signal: int = 3, **keys: Any) -> dict[str, Any]:
        caplog.set_level(logging.INFO, logger="gerl")
        caplog.clear()
        given = arguments(tmp_path / "run", *overrides, **keys)
        assert main([*given, f"signal={signal}", f"out={tmp_path}/signal.json"]) == 0
        assert not (tmp_path / "run").exists(), "a measurement leaves no run behind"
        return json.loads((tmp_path / "signal.json").read_text()) | {"text": caplog.text}

    return run


def test_gradients_of_batches_are_compared_step_by_step(measure: Measure) -> None:
    settings = ["sampling.kernel=precise", "sampling.window_range=[0,3]", "algorithm.timestep_weights=uniform"]
    found = measure(*settings, sampling__num_inference_steps=5)
    assert (found["batches"], found["images"], found["weighting"]) == (3, 8, "uniform")
    assert [step["facts"]["step"] for step in found["steps"]] == [0, 1, 2]
    assert all(step["norm"] > 0 and -1 <= step["cosine"]["mean"] <= 1 for step in found["steps"])
    assert sum(step["share"] for step in found["steps"]) == pytest.approx(1)
    names = [choice["name"] for choice in found["choices"]]
    assert "timestep_weights=std2_over_jacobian" in names and names[-2:] == ["window_range=[0,1]", "window_range=[0,2]"]
    assert found["notes"] == [] and "cosine between batches" in found["text"]


def test_workers_share_the_batches(measure: Measure) -> None:
    alone, shared = (measure(signal=2, cluster__num_workers=n) for n in (1, 2))
    for one, two in zip(alone["steps"], shared["steps"], strict=True):
        assert two["norm"] == pytest.approx(one["norm"], rel=1e-3)
        assert two["cosine"]["mean"] == pytest.approx(one["cosine"]["mean"], abs=1e-3)


@pytest.mark.parametrize("algorithm", ["awm_fast", "tempflow_grpo", "branch_grpo"])
def test_every_family_is_measured(measure: Measure, algorithm: str) -> None:
    settings = {"branch_grpo": ["algorithm.split_steps=[0,1]"], "tempflow_grpo": ["rollout.n=2"]}.get(algorithm, [])
    found = measure(f"algorithm={algorithm}", *settings, signal=4)
    steps = {"awm_fast": 1, "tempflow_grpo": 3, "branch_grpo": 3}[algorithm]
    assert len(found["steps"]) == steps and all(step["norm"] > 0 for step in found["steps"])
    assert (found["weighting"] is None) == (algorithm != "tempflow_grpo")
    assert any("6 prompts" in note for note in found["notes"]), "four batches of two prompts"


def test_rewards_that_are_all_equal_have_no_gradient(
    arguments: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "same.py").write_text("def compute_score(images, prompts, metadata):\n    return [1.0] * len(images)\n")
    assert main([*arguments(tmp_path / "run", scorer=tmp_path / "same.py"), "signal=2"]) == 1
    assert "no batch has a gradient" in capsys.readouterr().err
