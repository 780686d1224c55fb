"""What the screen says at the end of a run."""

import re
import textwrap
from pathlib import Path

import numpy as np
import pytest

from gerl.commandline.composition import Composed
from gerl.config import ActorConfig, Config, DataConfig, RewardConfig, RolloutConfig, ScorerConfig, TrainerConfig
from gerl.config.changes import Change
from gerl.protocol import Prompt
from gerl.run.checkpoint import RunLock
from gerl.run.validation import save_validation
from gerl.trainer.launch import Inputs, closing_screen, used_first, warn_resumed
from gerl.trainer.run_folder import RunFolder


def test_the_closing_screen(tmp_path: Path) -> None:
    pixels = np.zeros((3, 4, 4, 3), np.uint8)
    prompts = ["a", "b", "c"]
    for step, scores in ((0, [0.2, None, 0.4]), (5, [0.5, 0.5, 0.8]), (100, [None, None, 0.9])):
        save_validation(tmp_path, step, prompts, pixels, scores, {"ocr": scores})
    text = closing_screen(Config(), tmp_path, 100, 90.0)
    assert "1.5 min" in text and str(tmp_path / "report.html") in text
    # failed scores are left out, not 0, and with them the other score of their prompt
    assert re.search(r"ocr .* 1 of 3 .*0\.400 before.*0\.900 after", text)
    assert f"{tmp_path / 'checkpoints' / 'step_100' / 'lora'}" in text and "import" not in text
    (tmp_path / "checkpoints" / "step_100" / "lora").mkdir(parents=True)
    code = textwrap.dedent(closing_screen(Config(), tmp_path, 100, 90.0).partition("in plain diffusers:\n")[2])
    compile(code, "closing screen", "exec")
    assert f"{tmp_path / 'checkpoints' / 'step_100' / 'lora'}" in code


def test_the_closing_screen_has_the_success_rate(tmp_path: Path) -> None:
    config = Config(reward=RewardConfig({"ocr": ScorerConfig(success=0.5)}))
    for step, scores in ((0, [0.2, 0.6, 0.4]), (100, [0.5, 0.6, None])):
        save_validation(tmp_path, step, ["a", "b", "c"], np.zeros((3, 4, 4, 3), np.uint8), scores, {"ocr": scores})
    text = closing_screen(config, tmp_path, 100, 1.0)
    assert re.search(r"ocr/success_rate on 2 of 3 .*0\.500 before.*1\.000 after", text)


def test_the_closing_screen_without_validation(tmp_path: Path) -> None:
    config = Config(trainer=TrainerConfig(steps=7))
    text = closing_screen(config, tmp_path, 7, 1.0)
    assert str(tmp_path / "checkpoints" / "step_7" / "lora") in text and str(tmp_path / "report.html") in text
    pixels = np.zeros((1, 4, 4, 3), np.uint8)
    save_validation(tmp_path, 0, ["a"], pixels, [0.5], {"ocr": [0.5]})
    assert closing_screen(config, tmp_path, 7, 1.0) == text  # one validation alone: there is nothing to compare
    save_validation(tmp_path, 7, ["a"], pixels, [0.75], {"ocr": [0.75]})
    with_change = closing_screen(config, tmp_path, 7, 1.0).splitlines()
    (line,) = set(with_change) - set(text.splitlines())
    assert "0.500" in line and "0.750" in line


def test_images_are_checked_of_an_epoch_at_most() -> None:
    prompts, images = ([Prompt(sign * (i + 1), f"{i}") for i in range(5)] for sign in (1, -1))
    data = DataConfig(shuffle=False, regularise_images=1)
    for steps, start, expected in ((1, 0, [1, 2, -1]), (9, 0, [1, 2, 3, 4, 5, -1, -2, -3]), (5, 4, [3, 4, -5])):
        config = Config(data=data, rollout=RolloutConfig(prompts_per_step=2), trainer=TrainerConfig(steps=steps))
        found = used_first(config, Inputs(config, prompts, [], images, ""), start)
        assert [prompt.id for prompt in found] == expected


def test_a_learning_rate_that_rises_again_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for schedule, old, expected in (("cosine", 2, 1), ("linear", 3, 1), ("linear", 4, 0), ("constant", 2, 0)):
        config = Config(actor=ActorConfig(lr_schedule=schedule), trainer=TrainerConfig(steps=4))  # type: ignore[arg-type]
        folder = RunFolder(Composed(config, "", tmp_path), RunLock(tmp_path), None, [Change("trainer.steps", old, 4)])
        caplog.clear()
        warn_resumed(config, folder, [Prompt(0, "a fox")])
        assert [f"lr_schedule={schedule}" in said for said in caplog.messages] == [True] * expected
