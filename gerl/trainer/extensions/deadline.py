"""End the run after some hours, as SIGTERM does (trainer.hours)."""

import time

from gerl.config import Config
from gerl.errors import OutOfTime
from gerl.trainer.run import Extension, Run


class Deadline(Extension):
    """Begin no further step once the time is over; the run saves the last one."""

    @classmethod
    def wanted(cls, config: Config) -> bool:
        return config.trainer.hours is not None

    def stepping(self, run: Run) -> None:
        hours = self.config.trainer.hours
        if hours is not None and time.perf_counter() - run.history.started >= hours * 3600:
            raise OutOfTime(run.state.step, hours)
