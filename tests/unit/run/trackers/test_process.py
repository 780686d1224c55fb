"""A tracker whose package misbehaves costs a warning: for trackio stands a module here that does as a test says."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from drills import more
from PIL import Image
from tracked import TrackedLog

from gerl.config import LoggerConfig
from gerl.errors import ConfigError
from gerl.run.trackers import check_trackers, process

CONFIG = LoggerConfig(trackers=["trackio"])
PACKAGE = """
import os, signal, sys, time
from pathlib import Path
from types import SimpleNamespace

OUT = Path(__file__).with_name("seen.txt")

def note(*words):
    with OUT.open("a") as file:
        print(*words, file=file)

class Image:
    def __init__(self, path):
        note("image", Path(path).name)

class Artifact:
    def __init__(self, name, type, metadata):
        pass
    def add_dir(self, folder):
        note("lora", sorted((path.name, path.read_text()) for path in Path(folder).iterdir()))

class Run:
    id = "the-id"
    def log(self, metrics, step):
        note("log", step)
        if "x" in metrics and step == 2:
            misbehave("log")
    def log_artifact(self, artifact, aliases):
        note(*aliases)
    def alert(self, title, text, step):
        note("alert", step, text)
    def finish(self):
        misbehave("finish")
        note("finish")

def init(**given):
    note("init", given["project"], given["name"], given["resume"])
    misbehave("init")
    print("chatter of the package")
    return Run()

def misbehave(where):
"""
Package = Callable[[str], Path]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    """Write the module, which runs a line of Python at the begin, in step 2 and at the end; returns a run folder."""

    def write(line: str) -> Path:
        (tmp_path / "site").mkdir()
        (tmp_path / "site" / "trackio.py").write_text(f"{PACKAGE}    {line}\n")
        monkeypatch.syspath_prepend(str(tmp_path / "site"))
        monkeypatch.delitem(sys.modules, "trackio", raising=False)
        monkeypatch.delenv("TRACKIO_SPACE_ID", raising=False)
        monkeypatch.delenv("TRACKIO_SERVER_URL", raising=False)
        folder = tmp_path / "signs" / "run"
        folder.mkdir(parents=True)
        return folder

    return write


def write_run(folder: Path, start: int = -1) -> float:
    """A run of three steps; returns the seconds that it took."""
    began = time.perf_counter()
    tracker = TrackedLog(folder, CONFIG, start_step=start)
    for step in range(1, 4):
        tracker.image(step, "train", Image.new("RGB", (2, 2)))
        tracker.log(step, {"x": step})
    tracker.checkpoint(3, {"lora/a": b"1", "lora/b": b"2"})
    tracker.alert(3, "careful")
    tracker.close()
    tracker.close()
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 3
    return time.perf_counter() - began


def notes(folder: Path) -> Path:
    return folder.parents[1] / "site" / "seen.txt"


def seen(folder: Path) -> list[str]:
    return notes(folder).read_text().splitlines()


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_calls_arrive_in_order_and_a_resumed_run_goes_on_with_the_same_one(
    package: Package, caplog: pytest.LogCaptureFixture
) -> None:
    folder = package("pass")
    write_run(folder)
    steps = [line for step in (1, 2, 3) for line in (f"image train_{step:06d}.png", f"log {step}", f"log {step}")]
    assert seen(folder) == [
        *("init gerl signs-run never", *steps),
        *("lora [('a', '1'), ('b', '2')]", "step_3", "alert 3 careful", "finish"),
    ]
    assert warned(caplog) == []
    record = (folder / "trackers.json").read_text()
    assert json.loads(record) == {"trackio": {"project": "gerl", "name": "signs-run", "id": "the-id"}}
    assert "chatter of the package" in (folder / "trackers" / "trackio.log").read_text()
    moved = folder.rename(folder.with_name("renamed"))  # the tracker's run keeps its name
    write_run(moved, start=0)
    assert "init gerl signs-run allow" in seen(moved) and (moved / "trackers.json").read_text() == record


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("raise RuntimeError(f'no room in {where}')", "RuntimeError: no room in init"),
        ("where == 'log' and [][1]", "IndexError: list index out of range"),
        ("where == 'finish' and sys.exit('enough')", "SystemExit: enough"),
        ("where == 'log' and os._exit(3)", "its process has ended"),
        ("where == 'log' and os.kill(os.getpid(), signal.SIGKILL)", "its process has ended"),
        ("where == 'init' and input('your key: ')", "EOFError"),
        ("raise RuntimeError('token=abcdef was refused')", "token=*** was refused"),
    ],
    ids=["begin", "log", "exit at the end", "exit", "killed", "question", "secret"],
)
def test_one_warning_and_the_run_goes_on(
    line: str, why: str, package: Package, caplog: pytest.LogCaptureFixture
) -> None:
    folder = package(line)
    write_run(folder)
    (message,) = warned(caplog)
    assert message.startswith("trackio is disabled from here on: ") and why in message
    assert str(folder / "trackers" / "trackio.log") in message


@pytest.mark.parametrize("where", ["init", "log", "finish"])
def test_one_that_hangs_is_not_waited_for(
    where: str, package: Package, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "OPENING" if where == "init" else "CLOSING", 1.5)
    folder = package(f"where == {where!r} and (note('pid', os.getpid()), time.sleep(60))")
    assert write_run(folder) < 20
    (message,) = warned(caplog)
    assert "did not accept the rest within 2 s" in message
    lines = seen(folder) if where != "init" or notes(folder).exists() else []  # it may not have come as far
    for pid in (int(line.split()[1]) for line in lines if line.startswith("pid")):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_one_that_falls_behind_is_left_out_while_the_run_goes_on(
    package: Package, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "CALLS", 3)
    folder = package("time.sleep(60)")
    assert write_run(folder) < 20
    (message,) = warned(caplog)
    assert "slower than the run: 4 calls are pending" in message


def test_one_that_says_nothing_for_long_is_left_out(
    package: Package, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "SILENCE", 0.2)
    tracker = TrackedLog(package("time.sleep(60)"), CONFIG)
    time.sleep(0.3)
    tracker.log(1, {"x": 1})
    (message,) = warned(caplog)
    assert "not responded for 0 s" in message
    tracker.close()


def test_what_waits_for_a_tracker_is_bounded(
    package: Package, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "BYTES", 2**20)
    tracker = TrackedLog(package("time.sleep(60)"), CONFIG)
    for step in range(3):
        tracker.checkpoint(step, {"lora/a": bytes(2**19)})
    (message,) = warned(caplog)
    assert "slower than the run" in message
    tracker.close()


SCRIPT = """
import sys, time
from pathlib import Path
from gerl.config import LoggerConfig
from tracked import TrackedLog
tracker = TrackedLog(Path(sys.argv[1]), LoggerConfig(trackers=["trackio"]))
tracker.log(1, {"x": 1})
time.sleep(60)
"""


@more
def test_a_run_that_is_killed_still_closes_its_trackers(package: Package) -> None:
    folder = package("pass")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = subprocess.Popen([sys.executable, "-c", SCRIPT, str(folder)], env=environment)
    deadline = time.monotonic() + 60

    def wait_for(line: str) -> None:
        while not notes(folder).exists() or line not in seen(folder):
            assert time.monotonic() < deadline and (line == "finish" or run.poll() is None)
            time.sleep(0.05)

    wait_for("log 1")
    run.send_signal(signal.SIGKILL)
    run.wait()
    wait_for("finish")


def test_an_unreadable_record_begins_new_runs(package: Package, caplog: pytest.LogCaptureFixture) -> None:
    folder = package("pass")
    (folder / "trackers.json").write_text('{"trackio": ')
    write_run(folder)
    (message,) = warned(caplog)
    assert "trackers.json cannot be read" in message and "init gerl signs-run never" in seen(folder)
    assert json.loads((folder / "trackers.json").read_text())["trackio"]["id"] == "the-id"


@pytest.mark.parametrize("name", ["wandb", "trackio", "mlflow", "swanlab"])
def test_a_package_that_is_missing_is_said_with_its_extra(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).mkdir()  # as wandb makes one where it is called: no package
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for loaded in [module for module in sys.modules if module.partition(".")[0] == name]:
        monkeypatch.delitem(sys.modules, loaded)
    config = LoggerConfig(trackers=[name])  # type: ignore[list-item]
    with pytest.raises(ConfigError) as error:
        check_trackers(config)
    said = str(error.value)
    assert f"logger.trackers=[{name}]: " in said and f"pip install 'gerl[{name}]', or remove" in said
    check_trackers(LoggerConfig(trackers=[]))
