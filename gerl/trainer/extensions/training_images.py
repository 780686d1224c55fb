"""Save a sheet of training images with their rewards to `samples/`, as often as there is a validation."""

from gerl.trainer.extensions import Extension
from gerl.trainer.run import Run, due
from gerl.trainer.step import Step
from gerl.trainer.validation import training_sheet


class TrainingImages(Extension):
    """The first micro-batch of the first step and, with held-out prompts or without, of every `validation.every`th."""

    def scored(self, run: Run, step: Step) -> bool:
        every, total = run.config.validation.every, run.config.trainer.steps
        if step.rounds == 1 and (step.number == 1 or due(step.number, every, total)):
            first = len(step.tasks[0].samples)
            sheet = training_sheet(step.scores.samples[:first], step.images[0].result().pixels, step.scores.totals)
            run.picture(step.number, "train", sheet)
        return False
