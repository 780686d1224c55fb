"""Spans and durations, a bar on a terminal, lines in the log elsewhere."""

import io
import logging
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gerl import progress
from gerl.cluster import Pending
from gerl.progress import MAX_SPANS, Progress, Span, Timeline, joined
from gerl.run.live import chrome_trace, lanes, read_spans
from gerl.trainer.extensions.timeline import append_spans


def test_calls_of_a_worker_follow_each_other() -> None:
    timeline, reference = Timeline(), object()
    remote: list[Pending[Any]] = [Pending("worker 1", reference=reference) for _ in range(2)]  # type: ignore[arg-type]
    timeline.step = 3
    start = time.perf_counter()
    for call in remote:  # both are given to the worker at once
        timeline.submitted(call, "sample", start)
    here = Pending("worker 0", value=1)
    timeline.submitted(here, "validate", start)
    for call in remote:
        time.sleep(0.01)
        timeline.ended([call, here])
    timeline.ended(remote)  # said twice
    spans = timeline.take()
    own = [span for span in spans if span.worker == "worker 1"]
    assert len(own) == 2 and own[0].end == own[1].start and all(span.end - span.start > 0.009 for span in own)
    assert [span.what for span in spans if span.worker == "worker 0"] == ["validate"]
    assert {span.step for span in spans} == {3} and timeline.take() == []


def test_calls_that_are_given_up_leave_no_span() -> None:
    timeline, call = Timeline(), Pending[Any]("worker 1", reference=object())  # type: ignore[arg-type]
    timeline.submitted(call, "score", time.perf_counter())
    timeline.forget()
    timeline.ended([call])
    assert timeline.take() == []


def test_a_step_has_a_bounded_number_of_spans_that_cover_the_same_time() -> None:
    spans = [Span(f"worker {i % 2}", "sample", 1, float(i // 2), i // 2 + 0.9) for i in range(6000)]
    few = joined(spans)
    assert len(few) <= MAX_SPANS and {span.worker for span in few} == {"worker 0", "worker 1"}
    assert min(span.start for span in few) == 0 and max(span.end for span in few) == 2999.9
    assert joined(spans[:10]) == spans[:10]


def test_the_file_and_the_chrome_trace(tmp_path: Path) -> None:
    spans = [Span("scorer ocr, process 10", "score", 1, 5.0, 6.0), Span("scorer ocr, process 2", "score", 1, 5.5, 6.0)]
    append_spans(tmp_path, [*spans, Span("worker 10", "sample", 1, 4.0, 5.0)])
    append_spans(tmp_path, [Span("run", "update", 1, 6.00004, 7.5), Span("worker 2", "update", 1, 6.0, 7.5)])
    lines = (tmp_path / "timeline.jsonl").read_text().splitlines()
    rows = read_spans([*lines, "{", '{"step": 1}', '{"worker": "w", "what": "x", "step": 1, "start": "a", "end": 2}'])
    assert len(rows) == 5 and rows[3]["start"] == 6.0
    assert lanes(rows) == ["run", "worker 2", "worker 10", "scorer ocr, process 2", "scorer ocr, process 10"]
    events = chrome_trace(rows, "x")["traceEvents"]
    assert [e["ts"] for e in events if e["ph"] == "X"] == [1e6, 1.5e6, 0, 2e6, 2e6]


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
