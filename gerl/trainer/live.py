"""The images of the step that is trained, for who watches the run."""

from pathlib import Path

import torch

from gerl.protocol import Group
from gerl.run.live import MOST, LiveImage, save_live
from gerl.trainer.drawing import Drawn


def keep_live(run_dir: Path, step: int, drawn: Drawn, credit: torch.Tensor) -> None:
    """Write the first images of a step with their scores, and the advantage that each got from `credit` `[B, T]`."""
    scored, pixels = drawn.scored, list[object]()
    for images in drawn.images:
        found = list(images.result().pixels)
        pixels += found[: MOST - len(pixels)]
        if len(pixels) == MOST or found[0].ndim == 4:  # videos are large: those of one micro-batch are enough
            break
    drawn.images.clear()  # what is left of them need not wait for the end of the step
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
