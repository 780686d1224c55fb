"""Save training images with their rewards: sheets in `samples/`, and those of the latest steps in `live/`."""

import logging

import torch

from gerl.errors import GerlError
from gerl.protocol import Group
from gerl.run.live import MOST, LiveImage, remove_live, save_live
from gerl.trainer.extensions import Extension
from gerl.trainer.run import Run, due
from gerl.trainer.step import Step
from gerl.trainer.validation import training_sheet

logger = logging.getLogger(__name__)


class TrainingImages(Extension):
    """A sheet of the first micro-batch as often as there is a validation, and the live images of each step."""

    failed = False  # to write live images, which is logged once

    def starting(self, run: Run) -> None:
        if not self.config.logger.live:
            remove_live(run.run_dir)

    def scored(self, run: Run, step: Step) -> bool:
        every, total = run.config.validation.every, run.config.trainer.steps
        if step.rounds == 1 and (step.number == 1 or due(step.number, every, total)):
            first = len(step.tasks[0].samples)
            sheet = training_sheet(step.scores.samples[:first], step.images[0].result().pixels, step.scores.totals)
            run.picture(step.number, "train", sheet)
        return False

    def credited(self, run: Run, step: Step) -> None:
        if not self.config.logger.live:
            return
        try:
            save_live_images(run, step)
        except GerlError as error:
            if not self.failed:
                logger.warning("the page of the run is incomplete: %s", error)
            self.failed = True


def save_live_images(run: Run, step: Step) -> None:
    """Save the first images of a step with their scores and advantages (mean over the trained timesteps)."""
    assert step.credit is not None
    scores, pixels = step.scores, list[object]()
    for images in step.images:
        found = list(images.result().pixels)
        pixels += found[: MOST - len(pixels)]
        if len(pixels) == MOST or found[0].ndim == 4:  # videos are large: those of one micro-batch are enough
            break
    groups: dict[Group, int] = {}
    prompts, shown = list[str](), list[LiveImage]()
    for i, sample in enumerate(scores.samples[: len(pixels)]):
        if sample.group not in groups:
            groups[sample.group] = len(groups)
            prompts.append(sample.prompt.text)
        known = step.credit[i][~torch.isnan(step.credit[i])]
        advantage = float(known.mean()) if len(known) else None
        by_scorer = {name: values[i] for name, values in scores.by_scorer.items()}
        shown.append(LiveImage(groups[sample.group], sample.index, scores.totals[i], by_scorer, advantage))
    save_live(run.run_dir, step.number, prompts, shown, pixels, len(scores.samples))  # type: ignore[arg-type]
