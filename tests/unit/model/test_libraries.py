"""Warnings of diffusers and transformers about a user's input reach the log, once each."""

import logging

import diffusers
import pytest
import transformers

from gerl.model.libraries import quiet_libraries


def test_each_warning_is_passed_on_once(caplog: pytest.LogCaptureFixture) -> None:
    quiet_libraries()
    quiet_libraries()  # as every run of a process does
    assert not any(logging.getLogger(library.__name__).propagate for library in (diffusers, transformers))
    ours = [logging.getLogger(f"{library.__name__}.pipelines.x") for library in (diffusers, transformers)]
    with caplog.at_level(logging.WARNING):
        for log in ours:
            for _ in range(2):
                log.warning("`height` has to be\ndivisible by 16 but is 27.")
                log.info("loading weights")
                log.warning("The following part of your input was truncated because CLIP can only ...: ['x']")
    said = "`height` has to be divisible by 16 but is 27."
    passed_on = [record.getMessage() for record in caplog.records if record.name.startswith("gerl")]
    assert passed_on == [f"diffusers: {said}", f"transformers: {said}"]
