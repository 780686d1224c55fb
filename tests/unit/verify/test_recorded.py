"""Where the files of a run are found."""

from pathlib import Path

import pytest

from gerl.config import Config, DataConfig, ModelConfig, ValidationConfig
from gerl.run.card import Card
from gerl.verify.recorded import RunRecord


def test_files_of_a_run_are_found_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started, run = tmp_path / "started", tmp_path / "copies" / "outputs" / "run"
    for place, names in ((started, ("a.txt",)), (tmp_path / "copies", ("a.txt", "b.jsonl")), (run, ())):
        place.mkdir(parents=True, exist_ok=True)
        for name in names:
            (place / name).write_text(place.name)
    mixed = [{"path": "b.jsonl", "weight": 2.0}, "signs_train", "no.txt", "code.py:NAME"]
    model = ModelConfig(path="models/mine")
    (tmp_path / "copies" / model.path).mkdir(parents=True)
    (tmp_path / "copies" / model.path / "model_index.json").write_text("{}")
    config = Config(model=model, data=DataConfig(train=mixed), validation=ValidationConfig(data="a.txt"))
    beside = str(tmp_path / "copies" / "b.jsonl")

    def located() -> Config:
        return RunRecord(run)._located(config)

    monkeypatch.chdir(tmp_path)
    assert located().data.train == [mixed[0] | {"path": beside}, *mixed[1:]]  # type: ignore[operator]
    assert located().validation.data == str(tmp_path / "copies" / "a.txt")
    assert located().model.path == str(tmp_path / "copies" / "models" / "mine")
    monkeypatch.chdir(started)
    Card(run, [], "1 on cpu").end("finished")
    assert located().validation.data == "a.txt"  # it is here
    monkeypatch.chdir(tmp_path)
    assert located().validation.data == str(started / "a.txt")
