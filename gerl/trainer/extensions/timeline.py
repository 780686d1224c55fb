"""Write the spans of all workers into `timeline.jsonl`."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from gerl.errors import GerlError
from gerl.progress import Span
from gerl.run.live import TIMELINE
from gerl.trainer.run import Extension, Run
from gerl.trainer.step import Step
from gerl.utils.files import writing

logger = logging.getLogger(__name__)


class TimelineFile(Extension):
    """The spans of each step; a failed write is logged once and skipped."""

    failed = False

    def concluded(self, run: Run, step: Step) -> None:
        try:
            append_spans(run.run_dir, run.fleet.timeline.take())
        except GerlError as error:
            if not self.failed:
                logger.warning("the page of the run is incomplete: %s", error)
            self.failed = True


def append_spans(run_dir: Path, spans: Sequence[Span]) -> None:
    """Append `spans`, with times rounded to 0.1 ms; raises `GerlError` if they cannot be written."""
    if not spans:
        return
    path = run_dir / TIMELINE
    rows = [span._asdict() | {"start": round(span.start, 4), "end": round(span.end, 4)} for span in spans]
    lines = "".join([json.dumps(row) + "\n" for row in rows])
    with writing(path), path.open("a", encoding="utf-8") as file:
        file.write(lines)
