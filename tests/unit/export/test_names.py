"""Names of exported files: of two runs or steps they differ, since ComfyUI has all LoRAs in one folder."""

from pathlib import Path

from gerl.export.command import run_stem


def test_a_file_has_the_name_of_its_run_and_step(tmp_path: Path) -> None:
    names = {
        ("outputs/bright-signs", 24): "bright-signs_step24",
        ("outputs/mein Schild 猫", 2): "mein_Schild_猫_step2",
        ("outputs/signs/2026-05-01_10-00-00", 8): "signs_2026-05-01_10-00-00_step8",
        ("outputs/faces/2026-05-01_10-00-00", 8): "faces_2026-05-01_10-00-00_step8",
        ("sweeps/2026-05-01_10-00-00/0_actor.lr=1e-3", 8): "0_actor.lr_1e-3_step8",
    }
    assert {run_stem(tmp_path / run, step) for run, step in names} == set(names.values())
    assert [run_stem(tmp_path / run, step) for run, step in names] == list(names.values())
