"""Save a sheet of training images with their rewards to `samples/`, as often as there is a validation."""

from gerl.config import Config
from gerl.trainer.extensions import Extension
from gerl.trainer.run import Run
from gerl.trainer.step import Step
from gerl.trainer.validation import training_sheet


class TrainingImages(Extension):
    """The first micro-batch of the first step, and of steps that are validated."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)

    def scored(self, run: Run, step: Step) -> bool:
        if step.rounds == 1 and (step.number == 1 or run.validation_due(step.number)):
            first = len(step.tasks[0].samples)
            sheet = training_sheet(step.scores.samples[:first], step.images[0].result().pixels, step.scores.totals)
            run.picture(step.number, "train", sheet)
        return False
