import errno
import json
import logging
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gerl.errors import CheckpointError, ConfigError
from gerl.run import checkpoint as module
from gerl.run.checkpoint import (
    FORMAT,
    NAME,
    Checkpoint,
    RunLock,
    RunState,
    ScheduleState,
    WorkerState,
    alive_since,
    checkpoint_paths,
    find_run_to_resume,
    load_checkpoint,
    newest_checkpoint,
    save_checkpoint,
)
from gerl.run.choice import prune

FILES = {"lora/pytorch_lora_weights.safetensors": b"weights", "optimizer.safetensors": b"moments" * 100}


def names(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir())


def test_round_trip(tmp_path: Path) -> None:
    state = {"rng": [1, 2**63], "lr": 0.1 + 0.2, "val_reward": None, "nested": {"a": [1.5, "b"]}}
    path = save_checkpoint(tmp_path, 7, FILES, state)
    assert path == tmp_path / "step_7"
    assert names(tmp_path) == ["step_7"]
    loaded = load_checkpoint(path)
    assert (loaded.step, loaded.state, set(loaded.files)) == (7, state, set(FILES))
    assert {name: loaded.read(name) for name in FILES} == FILES
    with pytest.raises(CheckpointError, match="no file 'ema'"):
        loaded.read("ema")


def test_others_write_into_it_before_it_is_there(tmp_path: Path) -> None:
    def fill(folder: Path) -> None:
        assert not (tmp_path / "step_2").exists()
        (folder / "state").mkdir()
        (folder / "state" / "part").write_bytes(b"abc")

    path = save_checkpoint(tmp_path, 2, {"a": b"1"}, {}, fill)
    assert load_checkpoint(path).read("state/part") == b"abc"
    (path / "state" / "part").write_bytes(b"abd")
    with pytest.raises(CheckpointError, match="state/part has changed since it was written"):
        load_checkpoint(path)

    def fails(folder: Path) -> None:
        (folder / "part").write_bytes(b"abc")
        raise CheckpointError("a process is gone")

    with pytest.raises(CheckpointError, match="a process is gone"):
        save_checkpoint(tmp_path, 3, {}, {}, fails)
    assert names(tmp_path) == ["step_2"]


@pytest.mark.parametrize("name", ["../outside", "/absolute", "state.json", "manifest.json", ""])
def test_file_names_stay_inside(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="file name"):
        save_checkpoint(tmp_path, 1, {name: b""}, {})
    assert names(tmp_path) == []


@pytest.mark.parametrize("function", ["_write", "_put_in_place", "_sync"])
def test_failing_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    def full(path: Path, *_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, function, full)
    with pytest.raises(CheckpointError, match=r"step_3 cannot be written: No space left on device"):
        save_checkpoint(tmp_path, 3, FILES, {})
    assert names(tmp_path) == []


def test_root_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        save_checkpoint(tmp_path / "checkpoints", 1, FILES, {})


def test_failing_replacement_keeps_the_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path, 3, FILES, {"version": "old"})
    rename = Path.rename

    def refuse(self: Path, target: Path) -> Path:
        if self.name.startswith(".tmp"):
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(CheckpointError, match="Input/output error"):
        save_checkpoint(tmp_path, 3, FILES, {"version": "new"})
    assert names(tmp_path) == ["step_3"]
    assert load_checkpoint(tmp_path / "step_3").state == {"version": "old"}


def test_same_step_is_replaced(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 3, FILES, {"version": "old"})
    save_checkpoint(tmp_path, 3, {"only": b"1"}, {"version": "new"})
    loaded = load_checkpoint(tmp_path / "step_3")
    assert (loaded.state, loaded.files, names(tmp_path)) == ({"version": "new"}, ("only",), ["step_3"])


def test_replacement_killed_half_way_is_found(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 3, FILES, {"version": "old"})
    (tmp_path / "step_3").rename(tmp_path / ".old-step_3")
    found = newest_checkpoint(tmp_path)
    assert found is not None and found.state == {"version": "old"}
    prune(tmp_path, 1)
    assert names(tmp_path) == [".old-step_3"]
    save_checkpoint(tmp_path, 3, FILES, {"version": "new"})
    assert names(tmp_path) == ["step_3"]


@pytest.mark.parametrize("name", [*FILES, "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["missing", "altered", "cut"])
def test_damage_is_named(tmp_path: Path, name: str, damage: str) -> None:
    path = save_checkpoint(tmp_path, 1, FILES, {"step": 1})
    content = (path / name).read_bytes()
    (path / name).unlink()
    if damage != "missing":
        (path / name).write_bytes(content[:-1] if damage == "cut" else bytes([content[0] ^ 1]) + content[1:])
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path)
    assert str(path) in str(caught.value) and name in str(caught.value)


@pytest.mark.parametrize(
    ("manifest", "said"),
    [
        *((foreign, r"manifest\.json") for foreign in ([], {}, {"step": 1, "files": []})),
        ({"step": 1, "files": {"../x": {"size": 1}}}, r"manifest\.json"),
        (
            {
                "format": FORMAT,
                "step": 1,
                "files": {"../x": {"size": 0, "sha256": ""}, "state.json": {"size": 0, "sha256": ""}},
            },
            "outside",
        ),
    ],
)
def test_foreign_manifest(tmp_path: Path, manifest: object, said: str) -> None:
    path = save_checkpoint(tmp_path, 1, FILES, {})
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=said):
        load_checkpoint(path)


def test_newest_skips_and_names_the_damaged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert newest_checkpoint(tmp_path / "absent") is None
    for step in (2, 10, 9):
        save_checkpoint(tmp_path, step, FILES, {"step": step})
    (tmp_path / "step_10" / "optimizer.safetensors").write_bytes(b"x")
    with caplog.at_level(logging.WARNING):
        found = newest_checkpoint(tmp_path)
    assert found is not None and found.step == 9
    assert "step_10" in caplog.text and "optimizer.safetensors" in caplog.text
    for step in (2, 9):
        (tmp_path / f"step_{step}" / "state.json").unlink()
    with pytest.raises(CheckpointError, match="no checkpoint") as caught:
        newest_checkpoint(tmp_path)
    assert all(f"step_{step}" in str(caught.value) for step in (2, 9, 10))


def test_prune_does_not_count_damaged(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, step, FILES, {})
    (tmp_path / "step_3" / "manifest.json").unlink()
    prune(tmp_path, 1)
    assert names(tmp_path) == ["step_2", "step_3"]


def test_what_this_process_has_written_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    digest = module.file_digest
    monkeypatch.setattr(module, "file_digest", lambda path: read.append(path) or digest(path))
    for step in range(1, 6):
        save_checkpoint(tmp_path, step, {"x": b"x"}, {"val_reward": None})
        prune(tmp_path, 3)
    assert read == [] and [int(name[5:]) for name in names(tmp_path)] == [3, 4, 5]
    (tmp_path / "step_4" / "x").write_bytes(b"y")  # by somebody else: it counts no longer
    prune(tmp_path, 2)
    assert [int(name[5:]) for name in names(tmp_path)] == [3, 4, 5] and {path.parent.name for path in read} == {
        "step_4"
    }


def test_find_run_to_resume(tmp_path: Path) -> None:
    assert find_run_to_resume(tmp_path / "absent") is None
    for number, name in enumerate(["2024-01-02", "2024-01-01", "2024-01-03"]):
        path = save_checkpoint(tmp_path / name / "checkpoints", 1, FILES, {"finished": name == "2024-01-01"})
        os.utime(path / "manifest.json", (1000 + number, 1000 + number))
    (tmp_path / "2024-01-04" / "checkpoints" / ".tmp-step_1-x").mkdir(parents=True)
    (tmp_path / "note.txt").write_text("")
    assert find_run_to_resume(tmp_path) == tmp_path / "2024-01-03"
    for name in ("2024-01-01", "2024-01-02", "2024-01-03"):
        os.utime(tmp_path / name / "checkpoints" / "step_1" / "manifest.json", (1000, 1000))
    (tmp_path / "2024-01-03" / "checkpoints" / "step_1" / "manifest.json").unlink()
    assert find_run_to_resume(tmp_path) == tmp_path / "2024-01-02"
    assert checkpoint_paths(tmp_path / "2024-01-04" / "checkpoints") == []


def test_a_run_that_has_just_started_is_newer_than_a_checkpoint(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "old" / "checkpoints", 1, FILES, {})
    os.utime(path / "manifest.json", (1000, 1000))
    (tmp_path / "new").mkdir()
    lock = RunLock(tmp_path / "new")
    lock.acquire()
    assert find_run_to_resume(tmp_path) == tmp_path / "new"
    lock.release()
    assert find_run_to_resume(tmp_path) == tmp_path / "old"


@pytest.mark.parametrize(
    ("number", "said"),
    [(FORMAT + 1, "newer gerl.*: update"), (FORMAT - 1, "older gerl"), ("two", "damaged"), (None, "damaged")],
)
def test_the_format_of_a_checkpoint(tmp_path: Path, number: object, said: str) -> None:
    old, new = (save_checkpoint(tmp_path, step, FILES, {"step": step}) for step in (1, 2))
    manifest = json.loads((new / "manifest.json").read_text())
    assert manifest.pop("format") == FORMAT == load_checkpoint(old).format
    (new / "manifest.json").write_text(json.dumps(manifest | {"format": number}))
    with pytest.raises(CheckpointError, match=said):
        load_checkpoint(new)
    if isinstance(number, int) and number > FORMAT:
        with pytest.raises(CheckpointError, match=r"newer gerl"):  # the one before it is not taken instead
            newest_checkpoint(tmp_path)
        prune(tmp_path, 1)
        assert names(tmp_path) == ["step_1", "step_2"]


STATE = RunState(
    step=3,
    policy_version=5,
    nonfinite=1,
    val_reward=0.25,
    signals=["base/alignment"],
    unlogged={"reward/mean": 0.5, "reward/std": math.nan},
    worker=WorkerState(5, {"ema": 5}, True, ScheduleState(6)),
    algorithm={"past": {"7": [0.1]}},
    identity={"data.train": "0a"},
    settings={"trainer": {"seed": 0}},
)


def test_a_checkpoint_gives_back_the_record(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, STATE.step, {}, STATE.to_json())
    assert repr(RunState.of(load_checkpoint(tmp_path / "step_3"))) == repr(STATE)  # a NaN is not equal to itself


def worker(**changed: Any) -> dict[str, Any]:
    return {**STATE.to_json()["worker"], **changed}


@pytest.mark.parametrize(
    ("named", "value"),
    [
        ("worker", None),
        ("worker.policy_version", {}),
        ("worker.policy_version", worker(policy_version="5")),
        ("worker.averages", worker(averages=[1])),
        ("worker.averages.ema", worker(averages={"ema": "many"})),
        ("worker.old_is_current", worker(old_is_current=2)),
        ("worker.lr_schedule", worker(lr_schedule=None)),
        ("worker.lr_schedule.last_epoch", worker(lr_schedule={"last_epoch": 1.5})),
        ("step", "three"),
        ("step", "3"),
        ("step", 4),  # not the step of the manifest
        ("unlogged", 1),
        ("algorithm", []),
        ("identity.data.train", {"data.train": 7}),
        ("settings", "none"),
    ],
)
def test_a_damaged_record_is_an_error_that_names_the_entry(named: str, value: Any) -> None:
    values = json.loads(json.dumps(STATE.to_json())) | {named.split(".")[0]: value}
    with pytest.raises(CheckpointError, match=rf"no usable {named}; .*checkpoint\.resume=never"):
        RunState.of(Checkpoint(Path("run/checkpoints/step_3"), 3, values, ()))


# Takes the lock of argv[1], starts a child that outlives it, and waits.
HOLDER = """
import subprocess, sys, time
from pathlib import Path
from gerl.run.checkpoint import RunLock
lock = RunLock(Path(sys.argv[1]))
lock.acquire()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
print(child.pid, flush=True)
time.sleep(300)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    yield process
    process.kill()
    process.wait()
    os.kill(child, signal.SIGKILL)


def test_a_second_run_is_told_who_has_the_folder(tmp_path: Path, holder: "subprocess.Popen[str]") -> None:
    with pytest.raises(ConfigError) as caught:
        RunLock(tmp_path).acquire()
    message = str(caught.value)
    assert message.startswith(f"{tmp_path}: ") and "hydra.run.dir" in message
    assert re.search(rf"process {holder.pid} on {re.escape(socket.gethostname())}, since \d{{4}}-", message)
    since = alive_since(tmp_path)
    assert since is not None and abs(since / 1e9 - time.time()) < 600


def test_the_lock_ends_with_its_process_though_a_child_lives_on(
    tmp_path: Path, holder: "subprocess.Popen[str]"
) -> None:
    holder.kill()
    holder.wait()
    assert (tmp_path / NAME).exists() and alive_since(tmp_path) is None
    lock = RunLock(tmp_path)
    lock.acquire()
    assert alive_since(tmp_path) is not None
    lock.release()
    assert not list(tmp_path.iterdir())


def test_it_is_taken_again_after_its_release(tmp_path: Path) -> None:
    first, second = RunLock(tmp_path), RunLock(tmp_path)
    first.acquire()
    with pytest.raises(ConfigError):
        second.acquire()
    first.release()
    second.acquire()
    first.release()  # it has nothing to give back
    assert alive_since(tmp_path) is not None
    second.release()
    assert alive_since(tmp_path) is None


def test_a_folder_that_was_removed_under_the_lock(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    lock, other = RunLock(folder), RunLock(folder)
    lock.acquire()
    (folder / NAME).unlink()
    folder.rmdir()
    folder.mkdir()
    other.acquire()
    lock.release()  # the file that is there now is not its own
    assert alive_since(folder) is not None
    with pytest.raises(OSError, match="No such file"):
        RunLock(tmp_path / "nowhere").acquire()


def test_a_state_with_a_secret_is_readable_for_its_user_only(tmp_path: Path) -> None:
    for key, others in ({"api_key": "abc"}, 0), ({"url": "http://a"}, 0o044):
        settings = {"reward": {"scorers": {"vlm": {"kwargs": key}}}}
        path = save_checkpoint(tmp_path / str(others), 1, {"a": b"1"}, {"settings": settings})
        assert (path / "state.json").stat().st_mode & 0o044 == others
        assert load_checkpoint(path).state["settings"] == settings


def test_a_device_in_place_of_a_file_is_not_read(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, {"a": b"1"}, {})
    (path / "a").unlink()
    (path / "a").symlink_to("/dev/zero")
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["a"]["size"] = 0  # which a device reports
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="regular file"):
        load_checkpoint(path)
