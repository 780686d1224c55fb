from pathlib import Path

import pytest

from gerl.errors import GerlError
from gerl.vote.journal import Journal


def test_rows_come_back_in_order_and_the_folder_comes_with_the_first(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "run" / "votes")
    assert journal.replay() == [] and not (tmp_path / "run").exists()
    rows = [{"kind": "vote", "voter": "änna", "ranks": [1, 2]}, {"kind": "undo", "text": "two\nlines"}]
    for row in rows:
        journal.append(row)
        assert Journal(tmp_path / "run" / "votes").replay()[-1] == row  # without closing: it is on disk
    assert Journal(tmp_path / "run" / "votes").replay() == rows


def test_a_line_that_was_cut_off_is_taken_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal = Journal(tmp_path)
    journal.append({"kind": "vote"})
    with journal.path.open("ab") as file:
        file.write(b'{"kind": "vo')
    assert Journal(tmp_path).replay() == [{"kind": "vote"}] and "incomplete line" in caplog.text
    again = Journal(tmp_path)
    again.append({"kind": "undo"})
    assert [row["kind"] for row in Journal(tmp_path).replay()] == ["vote", "undo"]


@pytest.mark.parametrize("content", [b"not json\n", b"[1]\n", b'{"other": 1}\n', b"\xff\n"])
def test_another_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "journal.jsonl").write_bytes(content)
    with pytest.raises(GerlError, match="move it away"):
        Journal(tmp_path).replay()


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "votes").write_text("a file")
    with pytest.raises(GerlError, match="cannot be written"):
        Journal(tmp_path / "votes").append({"kind": "vote"})


def test_what_could_not_be_written_is_not_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path)
    journal.append({"kind": "vote", "number": 1})

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(GerlError, match="No space left"):
        patched.setattr("os.fsync", full)
        journal.append({"kind": "vote", "number": 2})
    journal.append({"kind": "vote", "number": 3})
    journal.close()
    assert [row["number"] for row in Journal(tmp_path).replay()] == [1, 3]
