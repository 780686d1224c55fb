"""The command line around the trainer: exit codes, the closing screen."""

import os
import re
import signal
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from gerl.commandline import signals
from gerl.config import Config, TrainerConfig
from gerl.errors import ConfigError, GerlError, Interrupted, ModelError, Stopped
from gerl.run.validation import save_validation
from gerl.trainer.closing import closing_screen
from gerl.trainer.main_flowgrpo import main


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_is_shown_and_nothing_started(
    option: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gerl.trainer.run.run", None)
    assert main([option, "trainer.stepz=1"]) == 0
    assert capsys.readouterr().out.startswith("usage: python -m gerl.trainer.main_flowgrpo")


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ConfigError("a.b=1: use 2"), 2, "error: a.b=1: use 2\n"),
        (ModelError("no pipeline"), 1, "error: no pipeline\n"),
        (GerlError("anything"), 1, "error: anything\n"),
        (Interrupted(signal.SIGTERM), 143, ""),
        (Interrupted(signal.SIGINT), 130, ""),
        (Interrupted("made anew by a library from its class and a text"), 130, ""),
        (KeyboardInterrupt(), 130, ""),
        (Stopped(3), 0, ""),
    ],
)
def test_exit_codes(
    error: BaseException, code: int, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("gerl.trainer.run.run", fail)
    assert main(["experiment=plain"]) == code
    assert capsys.readouterr().err == message


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ConfigError("a.b=1: use 2"), r"error: a\.b=1: use 2; what was saved; then stopped by SIGTERM\n"),
        (SystemExit(0), r"error: .*test_main\.py, line \d+, ended the process .*; then stopped by SIGTERM\n"),
        (ValueError("a bug"), r"Traceback (.*\n)*ValueError: a bug\nwhat was saved\nthen stopped by SIGTERM\n"),
        (Interrupted(signal.SIGTERM), ""),
    ],
)
def test_a_signal_after_an_error_decides_the_exit_code_and_hides_nothing(
    error: BaseException, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        try:
            raise error
        except BaseException:
            signals.answered()
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)  # Python runs the handler at the next opportunity
            error.add_note("what was saved")
            raise

    monkeypatch.setattr("gerl.trainer.run.run", fail)
    assert main(["experiment=plain"]) == 128 + signal.SIGTERM
    assert re.fullmatch(said, capsys.readouterr().err)


def test_a_bug_is_not_dressed_up_as_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gerl.trainer.run.run", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["experiment=plain"])


def test_the_closing_screen(tmp_path: Path) -> None:
    pixels = np.zeros((3, 4, 4, 3), np.uint8)
    prompts = ["a", "b", "c"]
    for step, scores in ((0, [0.2, None, 0.4]), (5, [0.5, 0.5, 0.8]), (100, [None, None, 0.9])):
        save_validation(tmp_path, step, prompts, pixels, scores, {"ocr": scores})
    text = closing_screen(Config(), tmp_path, [], 90.0)
    assert "1.5 min" in text and str(tmp_path / "report.html") in text
    # failed scores are left out, not 0, and with them the other score of their prompt
    assert re.search(r"ocr .* 1 of 3 .*0\.400 before.*0\.900 after", text)
    assert f"{tmp_path / 'checkpoints' / 'step_100' / 'lora'}" in text and "import" not in text
    (tmp_path / "checkpoints" / "step_100" / "lora").mkdir(parents=True)
    code = textwrap.dedent(closing_screen(Config(), tmp_path, [], 90.0).partition("in plain diffusers:\n")[2])
    compile(code, "closing screen", "exec")
    assert f"{tmp_path / 'checkpoints' / 'step_100' / 'lora'}" in code


def test_the_closing_screen_without_validation(tmp_path: Path) -> None:
    config = Config(trainer=TrainerConfig(steps=7))
    text = closing_screen(config, tmp_path, [], 1.0)
    assert str(tmp_path / "checkpoints" / "step_7" / "lora") in text and str(tmp_path / "report.html") in text
    pixels = np.zeros((1, 4, 4, 3), np.uint8)
    save_validation(tmp_path, 0, ["a"], pixels, [0.5], {"ocr": [0.5]})
    assert closing_screen(config, tmp_path, [], 1.0) == text  # one validation alone: there is nothing to compare
    save_validation(tmp_path, 7, ["a"], pixels, [0.75], {"ocr": [0.75]})
    with_change = closing_screen(config, tmp_path, [], 1.0).splitlines()
    (line,) = set(with_change) - set(text.splitlines())
    assert "0.500" in line and "0.750" in line
