"""Save a sheet of training images with their rewards to `samples/`, as often as there is a validation."""

from gerl.trainer.extensions import Extension
from gerl.trainer.run import Run
from gerl.trainer.step import Step
from gerl.trainer.validation import training_sheet


class TrainingImages(Extension):
    """The first micro-batch of the first step, and of those after which a validation is due."""

    def scored(self, run: Run, step: Step) -> bool:
        every, total = self.config.validation.every, self.config.trainer.steps
        due = step.number in (1, total) or (every > 0 and step.number % every == 0)  # also without held-out prompts
        if step.rounds == 1 and due:
            first = len(step.tasks[0].samples)
            sheet = training_sheet(step.scores.samples[:first], step.images[0].result().pixels, step.scores.totals)
            run.picture(step.number, "train", sheet)
        return False
