"""Where a pipeline in memory lies as files."""

from pathlib import Path

import pytest
import tiny
from huggingface_hub import constants

from gerl.api.pipelines import path_of
from gerl.errors import ModelError


def test_a_folder_a_hub_id_or_else_it_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    pipe, saved = tiny.sd3(layers=1), tmp_path / "saved"
    pipe.register_to_config(_name_or_path="me/tiny")
    assert path_of(pipe, saved, may_differ=True) == str(saved) and (saved / "model_index.json").is_file()
    snapshot = tmp_path / "cache" / "models--me--tiny" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "model_index.json").write_text("{}")
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    assert path_of(pipe, tmp_path / "other", may_differ=True) == "me/tiny"
    pipe.register_to_config(_name_or_path=str(saved))
    assert path_of(pipe, tmp_path / "other", may_differ=True) == str(saved)
    assert path_of(pipe, tmp_path / "again", may_differ=False) == str(tmp_path / "again")


def test_what_is_no_pipeline_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no pipeline of diffusers"):
        path_of("signs", tmp_path / "saved", may_differ=True)  # type: ignore[arg-type]
