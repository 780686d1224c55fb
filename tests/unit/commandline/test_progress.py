"""A bar on a terminal, lines in the log elsewhere."""

import io
import logging
import sys

import pytest

from gerl.commandline import progress
from gerl.commandline.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_shows_values_and_keeps_log_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    logger, handler = logging.getLogger(), logging.StreamHandler(sys.stderr)
    logger.addHandler(handler)
    try:
        before = list(logger.handlers)
        with Progress(total=4, initial=1) as shown:
            shown.update(values={"reward": 0.5, "kl": "0.1", "other": None})
            logging.getLogger("gerl.test").warning("a record")
            shown.go_back(1)
            shown.update(values={"reward": 0.5, "kl": "0.1", "other": None})
        assert logger.handlers == before
    finally:
        logger.removeHandler(handler)
    said = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert "2/4" in said and "reward=0.500" in said and "kl=0.1" in said and "other" not in said
    assert any(part.strip() == "a record" for part in said.replace("\r", "\n").split("\n"))


def test_without_a_terminal_there_are_lines_now_and_then(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    moment = 0.0
    monkeypatch.setattr(progress.time, "perf_counter", lambda: moment)
    with caplog.at_level("INFO", "gerl"), Progress(total=20) as shown:
        for _ in range(20):
            moment += 10.0
            shown.update(values={"reward": 0.25, "other": "0.853 (+0.1 to +0.2)"})
    assert caplog.messages[0] == "step 1/20  reward 0.250  other 0.853 (+0.1 to +0.2)  10 s/step  3 min left"
    assert [message.split()[1] for message in caplog.messages] == [f"{n}/20" for n in (1, 4, 7, 10, 13, 16, 19, 20)]
    with Progress(total=1, what="a part of it") as shown:  # whose progress is said elsewhere
        shown.update()
    assert caplog.messages[-1].endswith("10 s/step") and "\r" not in capsys.readouterr().err


def test_progress_can_be_silent(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "gerl"), Progress(total=2, disable=True) as shown:
        shown.update()
    shown.close()
    assert capsys.readouterr() == ("", "") and not caplog.messages
