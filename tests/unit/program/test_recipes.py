"""The table of the shipped experiments, and the file of one."""

from pathlib import Path

import pytest

from gerl.commandline.composition import compose_run, experiments
from gerl.commandline.recipes import recipe
from gerl.program.commands import main
from gerl.program.recipes import table


def test_every_experiment_has_a_row_and_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["name", "model", "algorithm", "reward"]
    rows = [line.split()[0] for line in lines[1:] if line and not line.startswith(" ")]
    assert rows == experiments()
    assert max(len(line) for line in lines if line.startswith(" ")) <= 110


def test_a_row_is_what_is_composed() -> None:
    found = recipe("sd35_medium_ocr")
    config = compose_run(["experiment=sd35_medium_ocr"]).config
    assert (found.model, found.algorithm) == (config.model.path, "flow_grpo_fast")
    assert found.reward == ", ".join(config.reward.scorers) == "ocr"
    assert found.sentence.startswith("SD3.5-Medium learns to write by Flow-GRPO-Fast without classifier-free guidance")
    assert found.sentence.endswith(".") and found.sentence.split()[-1] in table([found])


@pytest.mark.parametrize("name", ["signs", "sdxl_pickscore"])
def test_the_file_of_a_recipe_is_a_start_of_ones_own(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["recipes", name]) == 0
    mine = tmp_path / "mine.yaml"
    mine.write_text(capsys.readouterr().out, encoding="utf-8")
    assert compose_run([f"experiment={mine}"]).config == compose_run([f"experiment={name}"]).config
