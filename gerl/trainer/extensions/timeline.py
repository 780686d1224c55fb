"""Write the spans of all workers into `timeline.jsonl`."""

import logging

from gerl.errors import GerlError
from gerl.run.live import append_spans
from gerl.trainer.extensions import Extension
from gerl.trainer.run import Run
from gerl.trainer.step import Step

logger = logging.getLogger(__name__)


class TimelineFile(Extension):
    """The spans of each step; a failed write is logged once and skipped."""

    failed = False

    def concluded(self, run: Run, step: Step) -> None:
        try:
            append_spans(run.run_dir, run.timeline.take())
        except GerlError as error:
            if not self.failed:
                logger.warning("the page of the run is incomplete: %s", error)
            self.failed = True
