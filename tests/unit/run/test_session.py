import contextlib
import json
import logging
import re
import warnings
from pathlib import Path

import pytest

from gerl.errors import GerlError, Interrupted, ModelError
from gerl.run.session import RunLog, ask, asked, clear, session, take


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


logger = logging.getLogger("gerl.test")
LINE = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (\w+) ([\w.]+): (.*)"


def test_everything_is_kept_with_time_and_level_also_from_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="peft")
    handlers = list(logging.getLogger().handlers)
    with RunLog() as log:
        logger.warning("before %d", 1)
        log.open(tmp_path)
        logger.error("after, token=abcdef")
        logging.getLogger("peft.tuners").warning("of a library")
        warnings.warn("of Python", UserWarning, stacklevel=1)
    logger.warning("too late")
    assert logging.getLogger().handlers == handlers and warnings.showwarning is not logging._showwarning  # type: ignore[attr-defined]
    lines = (tmp_path / "log.txt").read_text().splitlines()
    found = [match.groups() for line in lines if (match := re.fullmatch(LINE, line))]
    assert found[:3] == [
        ("WARNING", "gerl.test", "before 1"),
        ("ERROR", "gerl.test", "after, token=***"),
        ("WARNING", "peft.tuners", "of a library"),
    ]
    assert found[3][:2] == ("WARNING", "py.warnings") and found[3][2].endswith("UserWarning: of Python")
    assert len(found) == 4


def test_a_resumed_run_appends_and_the_end_has_its_traceback(tmp_path: Path) -> None:
    for _ in range(2):
        with RunLog() as log:
            log.open(tmp_path)
            try:
                try:
                    raise ValueError("first cause")
                except ValueError as error:
                    raise ModelError("the sentence") from error
            except ModelError as error:
                log.failure(error)
    text = (tmp_path / "log.txt").read_text()
    assert text.count("the run ends: the sentence") == 2 and text.count("ValueError: first cause") == 2


def test_a_log_that_cannot_be_written(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with RunLog() as log, pytest.raises(GerlError, match=r"log\.txt cannot be written"):
        log.open(tmp_path / "nowhere")
    (tmp_path / "log.txt").symlink_to("/dev/full")
    with RunLog() as log:
        log.open(tmp_path)
        logger.warning("lost")
    assert "Traceback" not in capfd.readouterr().err


def test_a_command_is_taken_once(tmp_path: Path) -> None:
    assert not take(tmp_path, "save") and asked(tmp_path) == []
    ask(tmp_path, "stop")
    ask(tmp_path, "save")
    ask(tmp_path, "save")
    assert asked(tmp_path) == ["save", "stop"]
    assert take(tmp_path, "save") and not take(tmp_path, "save") and asked(tmp_path) == ["stop"]
    clear(tmp_path)
    assert asked(tmp_path) == [] and not (tmp_path / "control").exists()


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "control").write_text("a file")
    with pytest.raises(GerlError, match=r"control.* cannot be written"):
        ask(tmp_path, "save")
    clear(tmp_path)
