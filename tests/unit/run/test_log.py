import logging
import re
import warnings
from pathlib import Path

import pytest

from gerl.errors import GerlError, ModelError
from gerl.run.log import RunLog

logger = logging.getLogger("gerl.test")
LINE = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (\w+) ([\w.]+): (.*)"


def test_everything_is_kept_with_time_and_level_also_from_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="peft")
    handlers = list(logging.getLogger().handlers)
    with RunLog() as log:
        logger.warning("before %d", 1)
        log.open(tmp_path)
        logger.error("after, token=abcdef")
        logging.getLogger("peft.tuners").warning("of a library")
        warnings.warn("of Python", UserWarning, stacklevel=1)
    logger.warning("too late")
    assert logging.getLogger().handlers == handlers and warnings.showwarning is not logging._showwarning  # type: ignore[attr-defined]
    lines = (tmp_path / "log.txt").read_text().splitlines()
    found = [match.groups() for line in lines if (match := re.fullmatch(LINE, line))]
    assert found[:3] == [
        ("WARNING", "gerl.test", "before 1"),
        ("ERROR", "gerl.test", "after, token=***"),
        ("WARNING", "peft.tuners", "of a library"),
    ]
    assert found[3][:2] == ("WARNING", "py.warnings") and found[3][2].endswith("UserWarning: of Python")
    assert len(found) == 4


def test_a_resumed_run_appends_and_the_end_has_its_traceback(tmp_path: Path) -> None:
    for _ in range(2):
        with RunLog() as log:
            log.open(tmp_path)
            try:
                try:
                    raise ValueError("first cause")
                except ValueError as error:
                    raise ModelError("the sentence") from error
            except ModelError as error:
                log.failure(error)
    text = (tmp_path / "log.txt").read_text()
    assert text.count("the run ends: the sentence") == 2 and text.count("ValueError: first cause") == 2


def test_a_log_that_cannot_be_written(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with RunLog() as log, pytest.raises(GerlError, match=r"log\.txt cannot be written"):
        log.open(tmp_path / "nowhere")
    (tmp_path / "log.txt").symlink_to("/dev/full")
    with RunLog() as log:
        log.open(tmp_path)
        logger.warning("lost")
    assert "Traceback" not in capfd.readouterr().err
