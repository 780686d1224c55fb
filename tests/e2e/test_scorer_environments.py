"""Scorers whose processes have an environment of their own, over a real Ray.

Ray copies the environment of the command where that is a virtual one: here it is a thin one, which is copied at once.
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drills import more
from PIL import Image
from thin_environment import thin_environment, tiny_package

from gerl.cluster import Cluster
from gerl.config import ClusterConfig, Config, RewardConfig, RolloutConfig, SamplingConfig, ScorerConfig
from gerl.protocol import Images, Prompt
from gerl.rewards.manager import RewardManager
from gerl.rewards.trial import try_scorers
from gerl.rewards.worker import RewardWorker

ROOT = Path(__file__).resolve().parents[2]
OWN = """
import sys
import tinypackage

def compute_score(images, prompts, metadata):
    return {"value": [tinypackage.VALUE] * len(images), "thin": [float(sys.prefix == %r)] * len(images)}
"""
Score = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def score(tmp_path_factory: pytest.TempPathFactory) -> Score:
    """Runs `gerl.score` on two images in a thin environment, with a scorer `own` that has the environment `env`."""
    folder = tmp_path_factory.mktemp("thin")
    python = thin_environment(folder / "environment")
    tiny_package(folder / "wheels", "tinypackage", 0.25)
    (folder / "own.py").write_text(OWN % str(folder / "environment"))
    (folder / "images").mkdir()
    for i in range(2):
        Image.new("RGB", (8, 8), (90 * i, 0, 0)).save(folder / "images" / f"{i}.png")

    def run(env: str, out: str) -> "subprocess.CompletedProcess[str]":
        scorer = f"{{path: own.py, env: {env.replace('WHEELS', str(folder / 'wheels'))}}}"
        keys = ["images=images", "prompt=red", f"out={out}", f"reward.scorers={{own: {scorer}}}"]
        variables = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            "CUDA_VISIBLE_DEVICES": "",
        }
        command = [str(python), "-m", "gerl.score", *keys]
        return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=300)

    run.folder = folder  # type: ignore[attr-defined]
    return run


@more
def test_a_scorer_uses_packages_that_only_its_environment_has(score: Any) -> None:
    kind = "uv" if importlib.util.find_spec("uv") is not None else "pip"  # which takes twice as long
    done = score(f"{{{kind}: ['--no-index', '--find-links WHEELS', tinypackage]}}", kind)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (score.folder / kind / "scores.jsonl").read_text().splitlines()]
    assert [row["total"] for row in rows] == [0.25, 0.25]
    assert [row["own/thin"] for row in rows] == [0, 0]  # another environment than that of the command


@more
def test_an_environment_that_cannot_be_made_is_a_sentence(score: Any) -> None:
    done = score("{pip: ['--no-index', no-such-package]}", "failed")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "the environment of scorer own, process 0 could not be created" in line
    assert "no-such-package" in line and "correct reward.scorers.NAME.env" in line


@more
def test_an_environment_that_is_there_is_used_and_tried_on_grey_images(tmp_path: Path) -> None:
    python = thin_environment(tmp_path / "environment")
    packages = tmp_path / "environment/lib" / f"python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    (packages / "tinypackage.py").write_text("VALUE = 0.5\n")
    (tmp_path / "own.py").write_text(OWN % str(tmp_path / "environment"))
    scorer = ScorerConfig(path=str(tmp_path / "own.py"), env={"python": str(python)})
    config = Config(
        reward=RewardConfig({"own": scorer}),
        rollout=RolloutConfig(n=2, micro_batch_size=2),
        sampling=SamplingConfig(height=8, width=8),
    )
    with Cluster(ClusterConfig(device="cpu", num_workers=1)) as cluster:
        manager = RewardManager(config.reward, cluster)
        try_scorers(manager, config, [Prompt(0, "red")])
        (pool,) = manager.pools.values()
        assert pool.idle == [0]
        pixels = Images(0, np.zeros((2, 8, 8, 3), np.uint8), 0.0)
        arguments = ("own", [(0, 0), (0, 1)], ["red"] * 2, [{}] * 2, pixels)
        answer = pool.workers.submit(0, RewardWorker.score, *arguments)
        assert answer.result().rows == [{"own": 0.5, "own/thin": 1.0}] * 2
