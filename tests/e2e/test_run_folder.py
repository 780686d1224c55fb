"""The files of a run: its log, its card, times; none where it failed before it began, and a failure that says so."""

import json
import logging
import re
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from drills import more

from gerl.export.command import main as export
from gerl.run.checkpoint import load_checkpoint
from gerl.verify.command import main as verify

Train = Callable[..., Any]
Refused = Callable[..., str]
# A scorer that deletes the run folder in the second step, and one after whose call no file can grow any more.
DELETES = """
import shutil
from pathlib import Path

def compute_score(images, prompts, metadata, run):
    if (Path(run) / "metrics.jsonl").read_text():
        shutil.rmtree(run)
    return [0.1 * i for i in range(len(images))]
"""
FULL = """
import resource
from pathlib import Path

def compute_score(images, prompts, metadata, run):
    if (Path(run) / "metrics.jsonl").read_text():
        resource.setrlimit(resource.RLIMIT_FSIZE, (16, resource.RLIM_INFINITY))
    return [0.1 * i for i in range(len(images))]
"""
UNTRIED = {"reward.trial": "false"}  # these scorers read the metrics, which are not there before the run


def test_a_run_writes_its_log_its_card_and_the_times_of_its_steps(train: Train, tmp_path: Path) -> None:
    run = train(tmp_path / "run", trainer__steps=1)
    lines = (run.folder / "log.txt").read_text().splitlines()
    assert any(re.fullmatch(rf"[\d:.T-]+Z INFO [\w.]+: run folder: {run.folder}", line) for line in lines)
    assert any("LoRA of" in line for line in lines) and any("finished in" in line for line in lines)
    (session,) = json.loads((run.folder / "run.json").read_text())["sessions"]
    assert session["end"] == "finished" and "trainer.steps=1" in session["command"]
    assert datetime.fromisoformat(run.metrics[0]["time"]).tzinfo is not None


# the last two are refused by the first call of the pipeline
@pytest.mark.parametrize(
    "override",
    [
        "model.lora_targets=to_qq",
        "sampling.call.true_cfg=4",
        "sampling.call={max_sequence_length:1000}",
        "sampling.call={max_sequence_length:1000} algorithm=diffusion_nft",
    ],
)
def test_a_start_that_fails_leaves_no_folder(
    refused: Refused, tmp_path: Path, override: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="gerl"):
        message = refused(*override.split(), **{"hydra.run.dir": tmp_path / "outputs" / "plain" / "now"})
    assert list(tmp_path.iterdir()) == []
    assert not any(str(tmp_path) in message or "checkpoint" in line for line in (message, *caplog.messages))
    said = [line for line in caplog.messages if str(tmp_path) in line]
    assert not said or (said[0].startswith("run folder: ") and said[-1].endswith("is removed"))


def test_a_run_folder_that_is_deleted(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "deletes.py").write_text(DELETES)
    own = {"scorer": tmp_path / "deletes.py", "reward.scorers.bright.kwargs.run": tmp_path / "run", **UNTRIED}
    message = refused(trainer__steps=5, **own)
    assert re.search(r"run/metrics\.jsonl is gone.* step 2: .*deleted", message), message
    assert (tmp_path / "run" / "checkpoints" / "step_2").is_dir()  # what was trained is not lost


@more
def test_a_full_disk_in_the_middle_of_a_run(arguments: Any, start: Any, tmp_path: Path) -> None:
    (tmp_path / "full.py").write_text(FULL)
    own = {"scorer": tmp_path / "full.py", "reward.scorers.bright.kwargs.run": tmp_path / "run", **UNTRIED}
    process = start(arguments(tmp_path / "run", trainer__steps=5, logger__report="true", **own))
    _, shown = process.communicate(timeout=300)
    assert process.returncode == 1 and "Traceback" not in shown, shown
    last = shown.strip().splitlines()[-1]
    assert re.fullmatch(r"error: .*run/metrics\.jsonl cannot be written: File too large; free up space.*", last), shown
    assert any("report" in line for line in shown.splitlines()[:-1]), shown  # said too, but not as the cause


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("sampling.call={max_sequence_length: 600}", r"StableDiffusion3Pipeline fails.*max_sequence_length"),
        ("model.compile=foo", r"model\.compile='foo': .*inductor.*null"),
        ("sampling.call.foo=1", r"StableDiffusion3Pipeline takes no argument 'foo'.*sampling\.call"),
        ("model.path=nobody/nothing", r"model\.path='nobody/nothing' .*HF_HUB_OFFLINE.*unset it.* folder"),
    ],
)
def test_what_a_library_raises_is_a_sentence_with_the_key(
    refused: Refused, tmp_path: Path, override: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    key, value = override.split("=")
    message = refused(**{key: value}, expect=2 if key == "model.compile" else 1)
    assert re.search(named, message), message
    assert not (tmp_path / "run").exists()


@more
def test_over_ray_the_traceback_of_the_worker_is_in_the_log(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()  # a folder that was there stays, and with it the log
    message = refused("sampling.call={max_sequence_length: 600}", cluster__launcher="ray", cluster__num_workers=1)
    assert "max_sequence_length" in message
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "Traceback" in log and "check_inputs" in log  # of the pipeline, in the other process


@more
def test_over_ray_the_first_worker_checks_the_model_before_it_is_loaded(refused: Refused, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "model_index.json").write_text('{"_class_name": "StableDiffusion3Pipeline"}')  # no more of it is there
    message = refused("sampling.call.foo=1", model__path=model, cluster__launcher="ray", cluster__num_workers=1)
    assert re.search(r"StableDiffusion3Pipeline takes no argument 'foo'.*sampling\.call", message)
    assert not (tmp_path / "run").exists()


def test_a_secret_in_the_settings_is_said_and_not_shown(train: Train, tmp_path: Path) -> None:
    file, secret = tmp_path / "keyed.py", "s3cret-Value"
    file.write_text("def compute_score(images, prompts, metadata, api_key):\n    return [0.1] * len(images)\n")
    run = train(tmp_path / "run", f"reward.scorers.bright.kwargs={{api_key: {secret}}}", trainer__steps=1, scorer=file)
    said = (run.folder / "log.txt").read_text()
    assert "the secret in reward.scorers.bright.kwargs.api_key is stored in config.yaml" in said
    files = [path for path in run.folder.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]
    assert files and all(path.stat().st_mode & 0o077 == 0 for path in files)  # readable for its user only
    assert {path.name for path in files} == {"config.yaml", "state.json"}
    copy = tmp_path / "copy"
    (run.folder / "Makefile").write_text(secret)
    (run.folder / "votes").mkdir()
    (run.folder / "votes" / "tokens.json").write_text(json.dumps({"run": secret, "voters": {"anna": secret}}))
    assert export([f"run={run.folder}", f"out={copy}", "format=run"]) == 0
    paths = [path for path in copy.rglob("*") if path.is_file()]
    assert len(paths) > 10 and not any(secret.encode() in path.read_bytes() for path in paths)
    assert verify([f"run={copy}", "recompute=false"]) == 0  # the digests are those of the copy
    assert load_checkpoint(copy / "checkpoints" / "step_1").state["step"] == 1
