from pathlib import Path

import pytest

from gerl.errors import GerlError
from gerl.run.control import ask, asked, clear, take


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
