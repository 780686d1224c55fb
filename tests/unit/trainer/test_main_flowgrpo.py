"""The command line around the trainer: help and exit codes."""

import os
import re
import signal
import time

import pytest

from gerl.commandline import signals
from gerl.errors import ConfigError, GerlError, Interrupted, ModelError, OutOfTime, Stopped
from gerl.trainer.main_flowgrpo import main


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_is_shown_and_nothing_started(
    option: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gerl.trainer.launch.launch", None)
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
        (OutOfTime(3, 1.5), 143, ""),
    ],
)
def test_exit_codes(
    error: BaseException, code: int, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("gerl.trainer.launch.launch", fail)
    assert main(["experiment=plain"]) == code
    assert capsys.readouterr().err == message


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ConfigError("a.b=1: use 2"), r"error: a\.b=1: use 2; what was saved; then stopped by SIGTERM\n"),
        (SystemExit(0), r"error: .*test_main_flowgrpo\.py, line \d+, ended the process .*; then stopped by SIGTERM\n"),
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

    monkeypatch.setattr("gerl.trainer.launch.launch", fail)
    assert main(["experiment=plain"]) == 128 + signal.SIGTERM
    assert re.fullmatch(said, capsys.readouterr().err)


def test_a_bug_is_not_dressed_up_as_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gerl.trainer.launch.launch", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["experiment=plain"])
