"""The folder of an embedded Ray."""

import fcntl
import os
import stat
from pathlib import Path

import pytest

from gerl.cluster import local_ray as folders
from gerl.errors import ClusterError, Interrupted


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, however long its path may be."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr(folders, "LONGEST", 1000)
    return tmp_path


def test_nobody_else_may_enter_and_nothing_stays(base: Path) -> None:
    with folders.folder() as found:
        assert found.parent.parent == base and stat.S_IMODE(found.parent.stat().st_mode) == 0o700
        found.mkdir()
    assert not list(base.iterdir())


@pytest.mark.parametrize(("error", "kept"), [(ClusterError, True), (ZeroDivisionError, True), (Interrupted, False)])
def test_after_an_error_the_logs_stay(
    base: Path, caplog: pytest.LogCaptureFixture, error: type[BaseException], kept: bool
) -> None:
    with caplog.at_level("INFO"), pytest.raises(error), folders.folder() as found:
        found.mkdir()
        raise error(2)
    assert found.exists() is kept and (str(found) in caplog.text) is (error is ClusterError)


def test_a_long_path_is_replaced(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "LONGEST", 107)
    long = base / ("x" * 60)
    long.mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(long))
    with folders.folder() as found:
        sockets = f"{found}{folders.BELOW.partition(folders.RAY + '/session')[2]}"
        assert found.parent.parent == Path("/tmp") and len(sockets) < 107 and not list(long.iterdir())


def test_a_folder_that_cannot_be_made_is_said(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(base / "gone"))
    monkeypatch.setattr(folders.tempfile, "mkdtemp", refuse)
    with pytest.raises(ClusterError, match=r"gone \(No space.*/tmp \(No space.*RAY_TMPDIR"), folders.folder():
        pass
    monkeypatch.setattr(folders, "LONGEST", 90)
    with pytest.raises(ClusterError, match=r"TMPDIR=.*gone is too long .*/tmp \(No space"), folders.folder():
        pass


def refuse(prefix: str, dir: Path) -> str:
    raise OSError(28, "No space left on device", str(dir))


def test_what_dead_runs_left_is_removed_after_a_day(base: Path) -> None:
    old, running, young, other = (base / f"{folders.PREFIX}{name}" for name in ("old", "running", "young", "other"))
    for place in (old, running, young):
        place.mkdir()
        (place / folders.LOCK).touch()
    other.mkdir()  # without a lock: whatever it is
    for place in (old, running):
        os.utime(place / folders.LOCK, (0, 0))
    with (running / folders.LOCK).open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        folders.clean(base)
    assert not old.exists() and running.exists() and young.exists() and other.exists()
