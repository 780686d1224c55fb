"""The lock of a run folder: one holder, gone with its process, and not inherited."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gerl.errors import ConfigError
from gerl.run.lock import NAME, RunLock, alive_since

# Takes the lock of argv[1], starts a child that outlives it, and waits.
HOLDER = """
import subprocess, sys, time
from pathlib import Path
from gerl.run.lock import RunLock
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
    assert f"process {holder.pid} on {socket.gethostname()}, since {time.strftime('%Y-')}" in message
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
