"""For those who watch a run: the images of the step that is trained, and what its workers did.

A run does not end because of them: what cannot be written is said once, and left out.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from gerl.errors import GerlError
from gerl.protocol import Group
from gerl.run.live import MOST, LiveImage, forget_live, save_live
from gerl.run.timeline import append_spans
from gerl.timeline import Span
from gerl.trainer.drawing import Drawn

logger = logging.getLogger(__name__)


class Onlookers:
    """Writes `live/` and `timeline.jsonl`."""

    def __init__(self, run_dir: Path, live: bool) -> None:
        self.run_dir, self.live = run_dir, live
        self.said = False
        if not live:
            forget_live(run_dir)

    def images(self, step: int, drawn: Drawn, credit: torch.Tensor) -> None:
        """Write the images of a step, unless `logger.live` is false; `drawn` has them no more."""
        if self.live:
            try:
                keep_live(self.run_dir, step, drawn, credit)
            except GerlError as error:
                self._say(error)
        drawn.images.clear()  # what is left of them need not wait for the end of the step

    def spans(self, spans: Sequence[Span]) -> None:
        """Write what the workers did."""
        try:
            append_spans(self.run_dir, spans)
        except GerlError as error:
            self._say(error)

    def _say(self, error: GerlError) -> None:
        if not self.said:
            self.said = True
            logger.warning("the page of the run is incomplete: %s", error)


def keep_live(run_dir: Path, step: int, drawn: Drawn, credit: torch.Tensor) -> None:
    """Write the first images of a step with their scores, and the advantage that each got from `credit` `[B, T]`."""
    scored, pixels = drawn.scored, list[object]()
    for images in drawn.images:
        found = list(images.result().pixels)
        pixels += found[: MOST - len(pixels)]
        if len(pixels) == MOST or found[0].ndim == 4:  # videos are large: those of one micro-batch are enough
            break
    groups: dict[Group, int] = {}
    prompts, shown = list[str](), list[LiveImage]()
    for i, sample in enumerate(scored.samples[: len(pixels)]):
        if sample.group not in groups:
            groups[sample.group] = len(groups)
            prompts.append(sample.prompt.text)
        known = credit[i][~credit[i].isnan()]
        advantage = float(known.mean()) if len(known) else None
        scores = {name: values[i] for name, values in scored.by_scorer.items()}
        shown.append(LiveImage(groups[sample.group], sample.index, scored.totals[i], scores, advantage))
    save_live(run_dir, step, prompts, shown, pixels, len(scored.samples))  # type: ignore[arg-type]
