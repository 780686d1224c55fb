from pathlib import Path

import pytest

from gerl.errors import GerlError
from gerl.web.site import Folders


def make(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("{}")
    return folder


def test_runs_are_found_below_a_folder_and_beside_a_run(tmp_path: Path) -> None:
    outputs = tmp_path / "outputs"
    one, swept = make(outputs / "signs" / "one"), make(outputs / "other" / "sweeps" / "t" / "0_x")
    make(outputs / "signs" / "one" / "abandoned" / "config")  # no run of its own
    make(outputs / "signs" / ".hidden")
    (outputs / "signs" / "link").symlink_to(tmp_path, target_is_directory=True)
    names = ["other/sweeps/t/0_x", "signs/one"]
    assert list(Folders.of(outputs).runs()) == names and Folders.of(outputs).chosen is None
    found = Folders.of(one)
    assert found.chosen == "signs/one" and list(found.runs()) == names and found.runs()["signs/one"] == one.resolve()
    assert list(Folders.of(swept).runs()) == ["0_x"]
    make(outputs / "signs" / "later")
    assert "signs/later" in found.runs()


def test_a_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(GerlError, match=r"run=.*nowhere: there is no such folder; give a run folder"):
        Folders.of(tmp_path / "nowhere")
