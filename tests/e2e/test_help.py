"""The help of the commands beside training: each explains its own keys and those it passes on."""

import importlib

import pytest


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("score", "images prompts out batch reward.scorers.NAME.weight data.prompt_key geneval"),
        ("evaluate", "lora.NAME= images out validation.micro_batch_size"),
        ("export", "run out format weights step overwrite diffusers)"),
        ("preflight", "experiment=NAME|FILE.yaml out=FILE.json"),
    ],
)
def test_help_explains_every_key(command: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert importlib.import_module(f"gerl.{command}.command").main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(word in text for word in words.split()) and all(len(line) <= 250 for line in text.splitlines())
    assert command == "preflight" or "trainer." not in text
