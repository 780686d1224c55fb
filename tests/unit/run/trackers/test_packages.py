"""Each tracker with its real package, offline: what a run and the run that carries it on wrote is read back."""

import contextlib
import importlib
import json
import os
import struct
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from apart import find_trackers
from drills import more
from http_service import Answer, HttpService
from PIL import Image
from tracked import TrackedLog

from gerl.config import LoggerConfig
from gerl.run.trackers import REMOTE
from gerl.run.trackers.process import TrackerProcess

CONFIG = """
algorithm:
  name: awm
  kl_coef: 0.5
reward:
  scorers:
    judge:
      kwargs: {api_key: abcdef, url: "http://me:secret@host"}
"""
RED = (255, 0, 0)
REWARDS = {1: 0.25, 2: 0.5, 3: 0.75, 4: 1.0}  # a run is carried on after step 2
WARNING = "step 2: no training signal"


@dataclass(frozen=True)
class Tracked:
    """The folder of a run that was carried on, what `trackers.json` had before and after that, and what was left."""

    folder: Path
    records: list[dict[str, dict[str, str]]]
    left: list[int]  # processes of wandb's service that were still there when wandb had closed

    def id(self, tracker: str) -> str:
        first, second = (record[tracker] for record in self.records)
        assert first == second and first["project"] == "paint" and first["name"] == "signs-run"
        return first["id"]


@pytest.fixture(scope="module")
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        before = set(sys.modules)
        find_trackers(patch)
        yield patch
        for name in set(sys.modules) - before:  # nobody else must find them
            if name.partition(".")[0] in (*REMOTE, "sqlalchemy", "alembic"):
                del sys.modules[name]


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory, patch: pytest.MonkeyPatch) -> Tracked:
    """All four at the same time, so that their packages are imported side by side."""
    here = tmp_path_factory.mktemp("tracked")
    folder = here / "signs" / "run"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(CONFIG)
    patch.chdir(here)
    for name, value in {
        "WANDB_MODE": "offline",
        "WANDB_DATA_DIR": str(here / "staging"),
        "WANDB_X_DISABLE_STATS": "true",
        "SWANLAB_MODE": "offline",
        "SWANLAB_PROBE_MONITOR": "false",
        "TRACKIO_DIR": str(here / "trackio"),
        "MLFLOW_TRACKING_URI": f"sqlite:///{here}/mlflow.db",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }.items():
        patch.setenv(name, value)
    config = LoggerConfig(trackers=["wandb", "trackio", "mlflow", "swanlab"], project="paint", tags=["mine"])
    records, left = [], watch_service(patch, here / "staging")
    for start in (-1, 2):
        tracker = TrackedLog(folder, config, start_step=start)
        for step in range(max(start, 0) + 1, max(start, 0) + 3):
            tracker.image(step, "train", Image.new("RGB", (8, 4), RED))
            tracker.log(step, {"reward/mean": REWARDS[step]})
        if start < 0:
            tracker.alert(2, WARNING)
        tracker.checkpoint(step, {"lora/weights.safetensors": f"weights {step}".encode(), "state.safetensors": b"x"})
        tracker.close()
        records.append(json.loads((folder / "trackers.json").read_text()))
    return Tracked(folder, records, left)


def watch_service(patch: pytest.MonkeyPatch, data: Path) -> list[int]:
    """Filled in as wandb closes: the processes of its service that are still there then."""
    left: list[int] = []
    close = TrackerProcess.close

    def watched(tracker: TrackerProcess, failed: bool = False) -> None:
        close(tracker, failed)
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if (
                    tracker.name == "wandb"
                    and process.name() == "wandb-core"
                    and process.environ().get("WANDB_DATA_DIR") == str(data)
                ):
                    left.append(process.pid)

    patch.setattr(TrackerProcess, "close", watched)
    return left


def is_red(path: Path) -> bool:
    with Image.open(path) as picture:
        return picture.size == (8, 4) and picture.convert("RGB").getcolors() == [(32, RED)]


def leveldb_records(path: Path) -> Iterator[bytes]:
    """The records of a log file of LevelDB's format, after a header of 7 bytes."""
    data, at, record = path.read_bytes(), 7, b""
    while at < len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or its last part
            yield record
            record = b""


def wandb_records(path: Path) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    internal = importlib.import_module("wandb.proto.wandb_internal_pb2")
    for content in leveldb_records(path):
        record = internal.Record()
        record.ParseFromString(content)
        kind = record.WhichOneof("record_type")
        found.setdefault(kind, []).append(getattr(record, kind))
    return found


@more
def test_wandbs_service_has_written_the_end_of_a_run_when_it_closes(tracked: Tracked) -> None:
    assert tracked.left == []


@more
def test_wandb(tracked: Tracked) -> None:
    run_id, rewards, pictures, loras = tracked.id("wandb"), {}, {}, {}
    parts = sorted((tracked.folder / "wandb").glob(f"offline-run-*-{run_id}"))
    files = [wandb_records(part / f"run-{run_id}.wandb") for part in parts]
    assert len(files) == 2  # wandb sync makes one run of both
    for part, records in zip(parts, files, strict=True):
        (run,) = records["run"]
        assert (run.run_id, run.project, run.display_name, list(run.tags)) == (
            run_id,
            "paint",
            "signs-run",
            ["awm", "mine"],
        )
        config = {update.key: json.loads(update.value_json) for update in records["config"][0].update}
        assert config["algorithm"] == {"name": "awm", "kl_coef": 0.5}
        assert config["reward"]["scorers"]["judge"]["kwargs"] == {"api_key": "***", "url": "http://***@host"}
        for row in records["history"]:
            items = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in row.item}
            if "reward/mean" in items:
                rewards[items["step"]] = items["reward/mean"]
            else:
                pictures[items["step"]] = part / "files" / items["samples/train/path"]
        for artifact in records["artifact"]:
            (content,) = artifact.manifest.contents
            loras[json.loads(artifact.metadata)["step"]] = (content.path, Path(content.local_path).read_text())
            assert (artifact.name, artifact.type) == (f"lora-{run_id}", "model")
        assert [m.step_metric for m in records["metric"] if m.glob_name == "*"] == ["step"]
        assert [end.exit_code for end in records["exit"]] == [0]
    assert rewards == REWARDS
    assert pictures.keys() == REWARDS.keys() and all(map(is_red, pictures.values()))
    assert loras == {step: ("weights.safetensors", f"weights {step}") for step in (2, 4)}
    assert [alert.text for records in files for alert in records.get("alert", ())] == [WARNING]


def test_trackio(tracked: Tracked, patch: pytest.MonkeyPatch) -> None:
    storage = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
    trackio = importlib.import_module("trackio")
    run_id, media = tracked.id("trackio"), Path(os.environ["TRACKIO_DIR"]) / "media"
    assert storage.get_runs("paint") == ["signs-run"], "one run, which was carried on"
    rows = storage.get_logs("paint", "signs-run", run_id=run_id)
    assert {row["step"]: row["reward/mean"] for row in rows if "reward/mean" in row} == REWARDS
    pictures = {row["step"]: row["samples/train"]["file_path"] for row in rows if "samples/train" in row}
    assert pictures.keys() == REWARDS.keys() and all(is_red(media / name) for name in pictures.values())
    (run,) = trackio.Api().runs("paint")
    assert run.config["algorithm"] == {"name": "awm", "kl_coef": 0.5} and run.config["tags"] == ["awm", "mine"]
    assert run.config["reward"]["scorers"]["judge"]["kwargs"]["api_key"] == "***"
    assert [(alert["text"], alert["step"]) for alert in run.alerts()] == [(WARNING, 2)]
    blobs = (Path(os.environ["TRACKIO_DIR"]) / "artifacts").rglob("*")
    assert {path.read_text() for path in blobs if path.is_file()} == {"weights 2", "weights 4"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of MLflow's own use of SQLAlchemy
def test_mlflow(tracked: Tracked, tmp_path: Path) -> None:
    mlflow = importlib.import_module("mlflow")
    client, run_id = mlflow.MlflowClient(), tracked.id("mlflow")
    run = client.get_run(run_id)
    assert len(client.search_runs([run.info.experiment_id])) == 1
    assert (run.info.run_name, run.info.status) == ("signs-run", "FINISHED")
    assert {m.step: m.value for m in client.get_metric_history(run_id, "reward/mean")} == REWARDS
    assert run.data.params["algorithm.name"] == "awm" and run.data.params["algorithm.kl_coef"] == "0.5"
    assert json.loads(run.data.params["reward.scorers.judge.kwargs"])["api_key"] == "***"
    assert {"awm", "mine"} <= run.data.tags.keys() and run.data.tags["alert"] == WARNING
    for step in (2, 4):
        path = client.download_artifacts(run_id, f"checkpoints/step_{step}/lora/weights.safetensors", str(tmp_path))
        assert Path(path).read_text() == f"weights {step}"
    assert "kl_coef: 0.5" in Path(client.download_artifacts(run_id, "config.yaml", str(tmp_path))).read_text()
    pictures = [info.path for info in client.list_artifacts(run_id, "images") if info.path.endswith(".png")]
    assert sorted(int(name.split("step+")[1].split("+")[0]) for name in pictures) == [1, 2, 3, 4]
    assert all(is_red(Path(client.download_artifacts(run_id, name, str(tmp_path)))) for name in pictures)


@pytest.mark.filterwarnings("ignore::UserWarning:google.protobuf")
def test_swanlab(tracked: Tracked) -> None:
    store = importlib.import_module("swanlab.sdk.internal.core_python.store")
    record_type = importlib.import_module("swanlab.proto.swanlab.record.v1.record_pb2").Record
    run_id, rewards, pictures, texts, saved = tracked.id("swanlab"), {}, {}, [], {}
    parts = sorted((tracked.folder / "swanlab").glob(f"run-*-{run_id}"))
    assert len(parts) == 2  # swanlab sync makes one run of both
    for part in parts:
        reader = store.DataStoreReader()
        reader.open(part / f"run-{run_id}.swanlab")
        for content in reader:
            record = record_type()
            record.ParseFromString(content)
            if record.HasField("start"):
                start = record.start
                assert (start.id, start.project, start.name) == (run_id, "paint", "signs-run")
                assert list(start.tags) == ["awm", "mine"]
            elif record.HasField("scalar") and record.scalar.key == "reward/mean":
                rewards[record.scalar.step] = record.scalar.value.number
            elif record.HasField("media"):
                (item,) = record.media.value.items
                if record.media.key == "samples/train":
                    pictures[record.media.step] = part / "media" / "image" / item.filename
                else:
                    texts.append((record.media.step, (part / "media" / "text" / item.filename).read_text()))
            elif record.HasField("save") and record.save.name.startswith("lora/"):
                saved[record.save.name] = Path(record.save.target_path).read_text()
        settings = (part / "files" / "config.yaml").read_text()
        assert "kl_coef" in settings and "awm" in settings and "abcdef" not in settings
        reader.close()
    assert rewards == REWARDS and texts == [(2, WARNING)]
    assert pictures.keys() == REWARDS.keys() and all(map(is_red, pictures.values()))
    assert saved == {f"lora/step_{step}/weights.safetensors": f"weights {step}" for step in (2, 4)}


@pytest.fixture
def online(patch: pytest.MonkeyPatch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A function that lets all four ask for a server at an address."""

    def use(url: str) -> None:
        for name, value in {
            "WANDB_MODE": "online",
            "WANDB_BASE_URL": url,
            "WANDB_API_KEY": "a" * 40,
            "SWANLAB_MODE": "online",
            "SWANLAB_API_HOST": url,
            "SWANLAB_API_KEY": "abc",
            "TRACKIO_SERVER_URL": f"{url}/?write_token=hidden",
            "MLFLOW_TRACKING_URI": url,
        }.items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(tmp_path)

    return use


def warnings_of(caplog: pytest.LogCaptureFixture) -> dict[str, list[str]]:
    messages = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    return {name: [message for message in messages if message.startswith(name)] for name in REMOTE}


@more
def test_a_server_that_cannot_be_reached_costs_a_warning_and_seconds(
    online: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    service = HttpService(lambda asked: Answer())
    service.stop()  # its port is closed from now on
    online(service.url)
    started = time.perf_counter()
    tracker = TrackedLog(tmp_path, LoggerConfig(trackers=[*REMOTE]))  # type: ignore[list-item]
    for step in range(1, 4):
        tracker.log(step, {"x": step})
    writing = time.perf_counter() - started
    tracker.close()
    assert writing < 5 and time.perf_counter() - started < 45, "nothing waits but the end, for the imports"
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
    for name, found in warnings_of(caplog).items():
        assert len(found) == 1 and "disabled" in found[0] and service.url in found[0], (name, found)
        assert "hidden" not in found[0]
    assert not (tmp_path / "trackers.json").exists()


@more
def test_a_server_that_fails_in_every_call_costs_a_warning(
    online: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = HttpService(lambda asked: Answer(status=500))
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    try:
        online(service.url)
        tracker = TrackedLog(tmp_path, LoggerConfig(trackers=["mlflow"]))
        for step in range(1, 4):
            tracker.log(step, {"x": step})
        tracker.close()
        found = warnings_of(caplog)["mlflow"]
        assert (
            len(found) == 1 and "MlflowException" in found[0] and str(tmp_path / "trackers" / "mlflow.log") in found[0]
        )
        assert any(asked.path.startswith("/api/") for asked in service.asked)
        assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
    finally:
        service.stop()
