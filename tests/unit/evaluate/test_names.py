"""The LoRAs that are compared: their files, and what they are called."""

from pathlib import Path

import pytest

from gerl.errors import ConfigError, ModelError
from gerl.evaluate.loras import config_of, find_lora, name_loras


def test_loras_are_called_by_the_end_of_their_path() -> None:
    def names(*paths: str | tuple[str, str]) -> list[str]:
        given = [(None, path, Path(path)) if isinstance(path, str) else (*path, Path(path[1])) for path in paths]
        return list(name_loras(given))

    assert names() == []
    assert names("out/signs/A/checkpoints/step_30/lora", "cute.safetensors") == ["step_30", "cute"]
    runs = [f"out/signs/{run}/checkpoints/step_30/lora/pytorch_lora_weights.safetensors" for run in "AB"]
    assert names(*runs) == ["A/step_30", "B/step_30"]
    assert names(("x", runs[0]), runs[1]) == ["x", "step_30"]
    assert names("loras/base") == ["loras/base"]
    for given in ((("x", "a"), ("x", "b")), (("base", "a"),), ("a", "a")):
        with pytest.raises(ConfigError, match=r"; use lora\.NAME=PATH"):
            names(*given)


def test_the_configuration_of_a_lora_is_that_of_the_run_around_it(tmp_path: Path) -> None:
    lora = tmp_path / "run" / "checkpoints" / "step_1" / "lora"
    lora.mkdir(parents=True)
    assert config_of(lora / "x.safetensors") is None
    (tmp_path / "run" / "config.yaml").write_text("")
    assert config_of(lora / "x.safetensors") == str(tmp_path / "run" / "config.yaml")


def test_a_file_that_is_no_lora_is_said_before_a_model_is_loaded(tmp_path: Path) -> None:
    file = tmp_path / "mine.safetensors"
    file.write_bytes(b"not safetensors at all")
    for source in (file, tmp_path):
        with pytest.raises(ModelError, match=r"mine\.safetensors is not a readable LoRA .*give a \.safetensors"):
            find_lora(str(source))
