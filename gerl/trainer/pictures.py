"""The pictures of a validation: which are kept, and where."""

import re
from collections.abc import Sequence

import numpy as np

from gerl.algorithms.planning import VALIDATION_SEED, drawn_steps
from gerl.cluster import Pending
from gerl.pages.images import grid, still
from gerl.protocol import Images, ModelFacts, Sample, Scores
from gerl.run.tracking import Tracker
from gerl.run.validation import Drawing, save_validation
from gerl.trainer.credit import Scored
from gerl.utils.condition_images import COLUMNS

SHEET = 32  # pictures of the sheet in samples/
QUOTED = re.compile(
    r'["\u201c\u201d\u201e\u00ab\u00bb]([^"\u201c\u201d\u201e\u00ab\u00bb]+)["\u201c\u201d\u201e\u00ab\u00bb]'
)


def shown_prompts(count: int, images: int | None) -> list[int]:
    """Which of `count` held-out prompts have their pictures kept: `images` of them, or all where that is None.

    One is drawn from each of as many equally long parts of the file, the same ones at every validation: they represent
    whatever order the file has, also one in which kinds of prompts take turns.
    """
    return list(range(count)) if images is None else list(drawn_steps(range(count), images, "shown", VALIDATION_SEED))


def chosen_pixels(
    drawn: Sequence[Pending[Images]], batches: Sequence[Sequence[Sample]], shown: Sequence[int]
) -> list[np.ndarray]:
    """The pictures, uint8, of the prompts `shown` among drawn micro-batches; only batches with one are fetched."""
    found: list[np.ndarray] = []
    start = 0
    for images, batch in zip(drawn, batches, strict=True):
        rows = [i - start for i in shown if start <= i < start + len(batch)]
        if rows:
            pixels = images.result().pixels
            found += [np.array(pixels[row]) for row in rows]  # a copy, so that the others can go
        start += len(batch)
    return found


def keep_pictures(
    tracker: Tracker,
    step: int,
    scored: Scored,
    pixels: Sequence[np.ndarray],
    shown: Sequence[int],
    model: ModelFacts,
    device: str,
) -> None:
    """Write the rewards of a validation and the `pixels` of the prompts `shown` to the run folder, and a sheet of them.

    Raises `GerlError` if they cannot be written.
    """
    texts = [sample.prompt.text for sample in scored.samples]
    drawn = [scored.samples[i] for i in shown]
    given = [{n: v for n in COLUMNS if (v := s.prompt.metadata.get(n)) and n in model.picture_arguments} for s in drawn]
    drawing = Drawing(
        [sample.seed for sample in drawn], given, device, pixels[0].ndim == 4, model.scheduler, model.lora_lines
    )
    stills = [still(image) for image in pixels]
    save_validation(tracker.run_dir, step, texts, stills, scored.totals, scored.by_scorer, shown, drawing)
    sheet = drawn_steps(range(len(shown)), SHEET, "sheet", VALIDATION_SEED)
    failed = set(scored.failed)
    captions = [caption(texts[i], scored.totals[i], i in failed) for i in (shown[k] for k in sheet)]
    tracker.images(step, "validation", grid([stills[k] for k in sheet], captions, columns=4))


def training_sheet(tracker: Tracker, samples: Sequence[Sample], pixels: Sequence[np.ndarray], scores: Scores) -> None:
    """Write a sheet of a micro-batch of training images with their rewards to `samples/`."""
    captions = [caption(s.prompt.text, total) for s, total in zip(samples, scores.totals, strict=True)]
    stills = [still(image) for image in pixels[:SHEET]]
    tracker.images(samples[0].step, "train", grid(stills, captions[:SHEET], columns=4))


def caption(text: str, total: float | None, failed: bool = True) -> str:
    """The reward and the text to be drawn, which says more than the beginning of the prompt; else the prompt.

    `failed`: what is meant by a total of None; else that nothing scores the picture.
    """
    quoted = QUOTED.search(text)
    reward = f"{total:.2f} " if total is not None else "failed " if failed else ""
    return f"{reward}{quoted[1] if quoted else text}"
