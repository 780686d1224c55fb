"""The example of a torch reward model: scored as in a run, loaded once, shown as it is in docs/write_a_reward.md."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from gerl.config import ScorerConfig
from gerl.errors import RewardError
from gerl.protocol import Images, ScorerFailure
from gerl.rewards.scorers import build_scorer
from gerl.rewards.worker import RewardWorker
from gerl.score.command import main

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples" / "torch_reward_model.py"


@pytest.fixture
def weights(tmp_path: Path) -> str:
    path = str(tmp_path / "weights.pt")
    subprocess.run([sys.executable, str(EXAMPLE), path], check=True)
    return path


def worker(**kwargs: object) -> RewardWorker:
    made = RewardWorker({"mine": ScorerConfig(path=str(EXAMPLE), kwargs=kwargs)}, 0, os.getcwd())
    made.build()
    return made


def scored(by: RewardWorker, pixels: np.ndarray) -> list[float | ScorerFailure]:
    places, prompts = [(0, i) for i in range(len(pixels))], ["a cat"] * len(pixels)
    answer = by.score("mine", places, prompts, [{} for _ in pixels], Images(0, pixels, 0.0))
    return [row["mine"] for row in answer.rows]


def noise(count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, 40, 64, 3), dtype=np.uint8)


def by_hand(weights: str, pixels: np.ndarray) -> list[float]:
    """The scores of the images one by one, by the example's network alone."""
    example = runpy.run_path(str(EXAMPLE))
    network = example["network"]()
    network.load_state_dict(torch.load(weights))
    with torch.no_grad():
        return [float(network(example["pixels"](Image.fromarray(image))[None])) for image in pixels]


def test_a_worker_of_a_run_scores_by_the_network_in_batches(weights: str) -> None:
    found = scored(worker(weights=weights, batch_size=2), noise(5))
    assert found == pytest.approx(by_hand(weights, noise(5)), abs=0.02 if torch.cuda.is_available() else 1e-6)
    assert len(set(found)) == 5


def test_the_weights_are_read_at_the_first_score_and_once(weights: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reads, load = [], torch.load
    monkeypatch.setattr(torch, "load", lambda *given, **named: reads.append(given) or load(*given, **named))
    mine = worker(weights=weights)
    assert not reads
    assert scored(mine, noise(2)) == scored(mine, noise(2))
    assert len(reads) == 1


@pytest.mark.gpu
def test_on_a_gpu_it_computes_in_half_precision(weights: str) -> None:
    model = runpy.run_path(str(EXAMPLE))["RewardModel"](weights).model
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("cuda", torch.bfloat16)}


def test_weights_that_lack_or_are_not_there_are_a_failure(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match="cannot be called as"):
        build_scorer("mine", ScorerConfig(path=str(EXAMPLE)))
    (failure,) = scored(worker(weights=str(tmp_path / "none.pt")), noise(1))
    assert isinstance(failure, ScorerFailure) and "FileNotFoundError" in failure.reason
    assert "torch_reward_model.py, line" in failure.reason


def test_the_command_scores_a_folder_by_it(weights: str, tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    for i, image in enumerate(noise(3)):
        Image.fromarray(image).save(tmp_path / "images" / f"{i}.png")
    given = [str(tmp_path / "images"), "prompt=a cat", f"out={tmp_path / 'out'}", "logger.progress=false"]
    assert main([*given, f"reward.scorers={{mine: {{path: {EXAMPLE}, kwargs: {{weights: {weights}}}}}}}"]) == 0
    rows = (tmp_path / "out" / "scores.csv").read_text().splitlines()
    assert len(rows) == 4 and (tmp_path / "out" / "gallery.html").is_file()


def test_the_page_shows_the_code_of_the_example() -> None:
    code = "class " + EXAMPLE.read_text().partition("class ")[2].partition("if __name__")[0].rstrip()
    assert f"```python\n{code}\n```" in (ROOT / "docs" / "write_a_reward.md").read_text(encoding="utf-8")
