import logging

import pytest

from gerl.utils.logs import capture_logs


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
