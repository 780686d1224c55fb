"""Write `report.html` when a run ends, finished or not."""

import logging

from gerl.commandline import signals
from gerl.config import Config
from gerl.errors import GerlError
from gerl.progress import waiting
from gerl.run.report import write_report
from gerl.run.session import has_results
from gerl.trainer.run import Extension, Run

logger = logging.getLogger("gerl")


class Report(Extension):
    """Write the report; if it fails while another error ends the run, that error is kept."""

    @classmethod
    def wanted(cls, config: Config) -> bool:
        return config.logger.report

    def ended(self, run: Run, error: BaseException | None) -> None:
        if error is None:
            with waiting("writing the report"), signals.deferred():
                write_report(run.run_dir)
            return
        signals.answered()  # the run ends: a signal from here on must not hide why
        if has_results(run.run_dir):
            try:
                write_report(run.run_dir)
            except GerlError as second:
                logger.warning("the report was not written: %s", second)
