"""The pictures of a validation: which are kept, and where."""

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence

import numpy as np

from gerl.algorithms.planning import VALIDATION_SEED, drawn_steps
from gerl.cluster import Pending
from gerl.config import ValidationConfig
from gerl.pages.images import grid, still
from gerl.protocol import Images, ModelFacts, Sample, Scores
from gerl.run.tracking import Tracker
from gerl.run.validation import Drawing, Validation, save_validation
from gerl.trainer.credit import Scored
from gerl.utils.condition_images import COLUMNS
from gerl.utils.files import finite
from gerl.workers.looks import unlikeness

SHEET = 32  # pictures of the sheet in samples/
Looks = Mapping[str, np.ndarray]  # statistic -> its value for each image
QUOTED = re.compile(
    r'["\u201c\u201d\u201e\u00ab\u00bb]([^"\u201c\u201d\u201e\u00ab\u00bb]+)["\u201c\u201d\u201e\u00ab\u00bb]'
)


def shown_images(count: int, validation: ValidationConfig) -> list[int]:
    """Which of `count` held-out images are kept: all of `validation.images` prompts, or of all where that is None.

    One prompt is drawn from each of as many equally long parts of the file, the same ones at every validation: they
    represent whatever order the file has, also one in which kinds of prompts take turns.
    """
    each, wished = validation.images_per_prompt, validation.images
    prompts = range(count // each)
    chosen = prompts if wished is None else drawn_steps(prompts, wished, "shown", VALIDATION_SEED)
    return [prompt * each + k for prompt in chosen for k in range(each)]


def chosen_pixels(
    drawn: Sequence[Pending[Images]], batches: Sequence[Sequence[Sample]], shown: Sequence[int]
) -> tuple[list[np.ndarray], Looks]:
    """The pictures, uint8, of the images `shown`, rising, among drawn micro-batches; and how all of them look."""
    found: list[np.ndarray] = []
    looks: list[Looks] = []
    start = 0
    for pending, batch in zip(drawn, batches, strict=True):
        images = pending.result()
        first, last = bisect_left(shown, start), bisect_left(shown, start + len(batch))
        found += [np.array(images.pixels[i - start]) for i in shown[first:last]]  # copies
        looks.append(images.looks or {})
        start += len(batch)
    return found, {name: np.concatenate([part[name] for part in looks]) for name in looks[0]}


def keep_pictures(
    tracker: Tracker,
    step: int,
    scored: Scored,
    pixels: Sequence[np.ndarray],
    shown: Sequence[int],
    model: ModelFacts,
    device: str,
    looks: Looks,
) -> Validation:
    """Write a validation with the `pixels` of the images `shown` to the run folder, and a sheet of them.

    Returns it without the pictures. Raises `GerlError` if something cannot be written.
    """
    texts = [sample.prompt.text for sample in scored.samples]
    drawn = [scored.samples[i] for i in shown]
    given = [{n: v for n in COLUMNS if (v := s.prompt.metadata.get(n)) and n in model.arguments} for s in drawn]
    drawing = Drawing(
        [sample.seed for sample in drawn], given, device, pixels[0].ndim == 4, model.scheduler, model.lora_lines
    )
    stills = [still(image) for image in pixels]
    ids = [sample.prompt.id for sample in scored.samples]
    columns = {name: [finite(float(v)) for v in values] for name, values in _columns(looks, ids).items()}
    ids = ids if len(set(ids)) < len(ids) else []
    save_validation(tracker.run_dir, step, texts, stills, scored.totals, scored.by_scorer, shown, drawing, ids, columns)
    firsts = [k for k, i in enumerate(shown) if scored.samples[i].index == 0]
    sheet = [firsts[k] for k in drawn_steps(range(len(firsts)), SHEET, "sheet", VALIDATION_SEED)]
    failed = set(scored.failed)
    captions = [caption(texts[i], scored.totals[i], i in failed) for i in (shown[k] for k in sheet)]
    tracker.images(step, "validation", grid([stills[k] for k in sheet], captions, columns=4))
    return Validation(step, texts, scored.totals, scored.by_scorer, [], [], None, ids, columns)


def _columns(looks: Looks, ids: Sequence[int]) -> Looks:
    """The statistics of images, and in place of their thumbnails how unlike the images are."""
    found = dict(looks)
    if (thumbnails := found.pop("thumbnail", None)) is not None:
        found["unlike_own"], found["unlike_others"] = unlikeness(thumbnails, ids)
    return {name: values for name, values in found.items() if np.isfinite(values).any()}


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
