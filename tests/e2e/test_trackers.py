"""A whole run in trackers: what its folder has is what they have, and one that does not answer changes nothing."""

import importlib
import json
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from apart import find_trackers
from drills import more
from http_service import Answer, HttpService

from gerl.run.health import PATIENCE

Train = Callable[..., Any]
CONSTANT = "def compute_score(images, prompts, metadata):\n    return [0.25] * len(images)\n"
TINY = (
    *("rollout.prompts_per_step=1", "rollout.n=2", "sampling.num_inference_steps=2"),
    *("checkpoint.every=5", "checkpoint.keep=9", "logger.trackers=[trackio,mlflow]", "logger.project=paint"),
)


@more
def test_a_run_and_the_run_that_carries_it_on(
    train: Train, workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = set(sys.modules)
    find_trackers(monkeypatch)
    service = HttpService(lambda asked: Answer())
    service.stop()  # its port is closed from now on
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", service.url)
    (workplace / "constant.py").write_text(CONSTANT)
    folder = tmp_path / "runs" / "mine"
    for steps in (PATIENCE, PATIENCE + 1):
        caplog.clear()
        changes = {"trainer__steps": steps, "checkpoint__resume": "auto"}
        run = train(folder, *TINY, scorer="constant.py", **changes)
        left_out = [record.message for record in caplog.records if "is disabled" in record.message]
        assert len(left_out) == 1 and left_out[0].startswith(f"mlflow is disabled from here on: {service.url} ")
    try:
        storage = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
        (tracked,) = importlib.import_module("trackio").Api().runs("paint")
        assert json.loads((folder / "trackers.json").read_text()) == {
            "trackio": {"project": "paint", "name": "runs-mine", "id": tracked.id}
        }
        rows = storage.get_logs("paint", "runs-mine", run_id=tracked.id)
        scalars = [{k: v for k, v in row.items() if k in run.metrics[-1]} for row in rows if "reward/mean" in row]
        shown = [{k: v for k, v in row.items() if k not in ("time", "step")} for row in run.metrics]
        assert len(scalars) == PATIENCE + 1
        for logged, row in zip(scalars, shown, strict=True):
            kept = {k: v for k, v in row.items() if v is not None and k in run.metrics[-1]}
            assert {k: logged[k] for k in kept} == pytest.approx(kept)
        sheets = sorted(int(path.stem.rpartition("_")[2]) for path in (folder / "samples").glob("train_*.png"))
        assert [row["step"] for row in rows if "samples/train" in row] == sheets and len(sheets) == 3
        assert tracked.config["model"]["lora_rank"] == 4 and "flow_grpo" in tracked.config["tags"]
        (alert,) = tracked.alerts()
        assert alert["step"] == PATIENCE and "bright gave 0.25 to every image" in alert["text"]
        blobs = {path.read_bytes() for path in (tmp_path / "trackio" / "artifacts").rglob("*") if path.is_file()}
        loras = [run.checkpoint(step) / "lora" for step in (PATIENCE, PATIENCE + 1)]
        assert blobs == {path.read_bytes() for lora in loras for path in lora.iterdir()}
    finally:
        for name in set(sys.modules) - loaded:  # nobody else must find it
            if name.partition(".")[0] == "trackio":
                del sys.modules[name]


@pytest.mark.skipif(find_spec("wandb") is not None, reason="wandb is installed")
def test_a_package_that_is_missing_is_said_before_anything_is_loaded(
    refused: Callable[..., str], tmp_path: Path
) -> None:
    message = refused("logger.trackers=[tensorboard,wandb]", expect=2, model__path=tmp_path / "nothing")
    assert (
        "logger.trackers=[tensorboard, wandb]: the package wandb is not installed; pip install 'gerl[wandb]'" in message
    )
    assert not (tmp_path / "run").exists()
