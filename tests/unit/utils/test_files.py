"""Files that are written completely or not at all."""

import csv
import io
import logging
import multiprocessing
from pathlib import Path

import pytest

from gerl.errors import GerlError
from gerl.utils.files import capture_logs, csv_text, write_file

TIMES, LENGTH = 200, 100_000


def write_many(path: Path, letter: str) -> None:
    for _ in range(TIMES):
        write_file(path, letter * LENGTH)


def test_processes_that_write_the_same_file_do_not_disturb_each_other(tmp_path: Path) -> None:
    path, context = tmp_path / "table.csv", multiprocessing.get_context("spawn")
    writers = [context.Process(target=write_many, args=(path, letter)) for letter in "ab"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert path.read_text() in ("a" * LENGTH, "b" * LENGTH) and list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.mkdir()
    with pytest.raises(GerlError, match="choose another folder"):
        write_file(path, "a")
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(GerlError, match="choose another folder"):
        write_file(path / "file" / "under" / "none", "a")


def test_messages_are_collected_in_place_of_being_passed_on(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("gerl.somewhere.below")
    with caplog.at_level(logging.INFO, logger="gerl"):
        with capture_logs("gerl.somewhere", logging.INFO) as notes:
            logger.debug("not this")
            logger.info("one %d", 1)
            logging.getLogger("gerl.elsewhere").info("passed on")
        logger.info("again")
    assert notes == ["one 1"] and caplog.messages == ["passed on", "again"]


def test_the_logger_is_as_before_after_an_error() -> None:
    logger = logging.getLogger("gerl.somewhere")
    before = logger.level, logger.propagate, list(logger.handlers)
    with pytest.raises(ZeroDivisionError), capture_logs("gerl.somewhere", logging.WARNING):
        raise ZeroDivisionError
    assert (logger.level, logger.propagate, logger.handlers) == before


def test_no_cell_of_a_table_is_a_formula() -> None:
    texts = ["=cmd|' /C calc'!A0", "+1+1", "-- a fox", "@SUM(A1)", "\tx", "a fox", "-0.5", "+1e-3", ""]
    rows = list(csv.DictReader(io.StringIO(csv_text(["text", "n"], [{"text": text, "n": -1.5} for text in texts]))))
    shown = [f"'{text}" if text[:1] in tuple("=+-@\t") and text not in ("-0.5", "+1e-3") else text for text in texts]
    assert [row["text"] for row in rows] == shown and {row["n"] for row in rows} == {"-1.5"}
