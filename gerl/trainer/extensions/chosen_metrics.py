"""Refuse a held-out metric that the first validation does not have (`checkpoint.best`)."""

from gerl.config import Config
from gerl.config.held_out import OF_EVERY_COLUMN, chosen, parts, unknown
from gerl.errors import ConfigError
from gerl.trainer.run import Extension, Run
from gerl.trainer.step import Step


class ChosenMetrics(Extension):
    """Names of further columns of scorers are known only then, if the scorers are not tried before (reward.trial)."""

    @classmethod
    def wanted(cls, config: Config) -> bool:
        return bool(chosen(config.checkpoint.best, config.trainer.stop_at))

    def validated(self, run: Run, step: Step) -> None:
        for key, metric in chosen(self.config.checkpoint.best, self.config.trainer.stop_at).items():
            column, statistic = parts(metric)
            mean = f"val/{column}/mean" if statistic in OF_EVERY_COLUMN else metric
            if mean not in step.metrics:
                raise ConfigError(unknown(key, metric, [name for name in step.metrics if name.startswith("val/")]))
