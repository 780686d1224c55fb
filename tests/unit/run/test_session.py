import contextlib
import json
import logging
from pathlib import Path

import pytest

from gerl.errors import GerlError, Interrupted
from gerl.run.log import RunLog
from gerl.run.session import session


@contextlib.contextmanager
def a_session(folder: Path):  # type: ignore[no-untyped-def]
    with RunLog() as log, session(folder, log, ["a=1"], "1 on cpu") as begin:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text("a: 1\n")
        begin()
        yield


def test_a_run_that_is_refused_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text("of the run\n")
    with pytest.raises(GerlError), RunLog() as log, session(tmp_path, log, [], "1 on cpu"):
        logging.getLogger("gerl").warning("before it is refused")
        raise GerlError("no")
    assert [path.name for path in tmp_path.iterdir()] == ["log.txt"]
    assert (tmp_path / "log.txt").read_text() == "of the run\n"


def test_what_came_before_the_run_was_accepted_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gerl.run.session.now", lambda: "2026-01-02T03:04:05Z")
    with RunLog() as log, session(tmp_path, log, [], "1 on cpu") as begin:
        logging.getLogger("gerl").warning("while it was checked")
        monkeypatch.undo()
        begin()
    assert "while it was checked" in (tmp_path / "log.txt").read_text()
    (entry,) = json.loads((tmp_path / "run.json").read_text())["sessions"]
    assert entry["started"] == "2026-01-02T03:04:05Z" < entry["ended"]


def card(folder: Path) -> list[tuple[str, str | None]]:
    return [(s["end"], s.get("error")) for s in json.loads((folder / "run.json").read_text())["sessions"]]


@pytest.mark.parametrize("error", [GerlError("no"), Interrupted(15), KeyboardInterrupt(), ValueError("a bug")])
def test_a_start_that_fails_leaves_no_folder(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)), a_session(tmp_path / "outputs" / "signs" / "today"):
        assert (tmp_path / "outputs" / "signs" / "today" / "log.txt").exists()
        raise error
    assert list(tmp_path.iterdir()) == []


def test_votes_of_people_stay_where_nothing_else_came_of_a_run(tmp_path: Path) -> None:
    with pytest.raises(Interrupted), a_session(tmp_path / "run"):
        (tmp_path / "run" / "votes").mkdir()
        (tmp_path / "run" / "votes" / "journal.jsonl").write_text("{}\n")
        raise Interrupted(2)
    assert (tmp_path / "run" / "votes" / "journal.jsonl").exists()


def test_other_runs_beside_it_stay(tmp_path: Path) -> None:
    with pytest.raises(GerlError), a_session(tmp_path / "outputs" / "one"):
        (tmp_path / "outputs" / "two").mkdir()
        raise GerlError("no")
    assert [path.name for path in (tmp_path / "outputs").iterdir()] == ["two"]


@pytest.mark.parametrize("result", ["metrics.jsonl", "checkpoints/step_1/state.json"])
def test_a_run_that_has_results_stays(tmp_path: Path, result: str) -> None:
    run = tmp_path / "run"
    with pytest.raises(Interrupted), a_session(run):
        (run / result).parent.mkdir(parents=True, exist_ok=True)
        (run / result).write_text("{}\n")
        raise Interrupted(2)
    assert (run / result).exists() and card(run) == [("interrupted", "Interrupted: interrupted by signal 2")]
    assert "the run ends" in (run / "log.txt").read_text()


def test_a_folder_that_was_there_stays(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with pytest.raises(GerlError), a_session(tmp_path / "run"):
        raise GerlError("no")
    assert card(tmp_path / "run") == [("error", "GerlError: no")]
    with a_session(tmp_path / "run"):
        pass
    assert card(tmp_path / "run") == [("error", "GerlError: no"), ("finished", None)]


def test_the_first_cause_is_raised_when_the_card_cannot_be_written_either(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with pytest.raises(GerlError, match="the first"), a_session(tmp_path / "run"):
        (tmp_path / "run" / "run.json").unlink()
        (tmp_path / "run" / "run.json").mkdir()
        raise GerlError("the first")
