"""Write images of the current step into `live/`, for the page of the run."""

import logging

import torch

from gerl.errors import GerlError
from gerl.protocol import Group
from gerl.run.live import MOST, LiveImage, remove_live, save_live
from gerl.trainer.extensions import Extension
from gerl.trainer.run import Run
from gerl.trainer.step import Step

logger = logging.getLogger(__name__)


class LiveImages(Extension):
    """Images of the latest steps with scores and advantages; a failed write is logged once and skipped."""

    said = False

    def starting(self, run: Run) -> None:
        if not self.config.logger.live:
            remove_live(run.run_dir)

    def credited(self, run: Run, step: Step) -> None:
        if not self.config.logger.live:
            return
        try:
            keep_live(run, step)
        except GerlError as error:
            if not self.said:
                self.said = True
                logger.warning("the page of the run is incomplete: %s", error)


def keep_live(run: Run, step: Step) -> None:
    """Write the first images of a step with the scores and the advantage of each."""
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
