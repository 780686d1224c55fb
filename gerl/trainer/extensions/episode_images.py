"""Save the images of episodes for the page, with the image that each turn starts from, and sheets in `samples/`.

`live/step_N.json` has those of a training step, `validation/episode_N.json` those of held-out prompts; each is beside a
sheet of its images. The files are those of `gerl.trainer.extensions.training_images` with `turns`: of each group its
turn, its role, what the model was asked instead of the prompt, and the image or text it starts from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image

from gerl.config import Config
from gerl.protocol import Group, Prompt, Sample, Scores, Turn
from gerl.run.live import EPISODES
from gerl.run.validation import evenly
from gerl.trainer.extensions.training_images import (
    MAX_IMAGES,
    TrainingImages,
    live_path,
    mean_advantage,
    save_sheet,
    thin,
)
from gerl.trainer.plan import due
from gerl.trainer.run import Run
from gerl.trainer.step import Step
from gerl.trainer.validation import shown_images
from gerl.utils.pages import grid, still

if TYPE_CHECKING:
    from gerl.cluster import Pending
    from gerl.protocol import Images
    from gerl.trainer.run import HeldOut

SHOWN = 4  # prompts of a sheet in samples/
HELD_OUT = 32  # held-out images of a sheet in validation/


class EpisodeImages(TrainingImages):
    """Save the episodes of each step and validation."""

    @classmethod
    def wanted(cls, config: Config) -> bool:
        return bool(config.episode.turns)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.scores, self.pixels = Scores(), list[np.ndarray]()  # of the turns of a validation so far

    def credited(self, run: Run, step: Step) -> None:
        if step.number == 1 or due(step.number, run.config.validation.every, run.config.trainer.steps):
            run.picture(step.number, "episode", episode_sheet(step.scores, pixels_of(step.images)))
        super().credited(run, step)

    def save_live(self, run: Run, step: Step) -> None:
        path = live_path(run.run_dir, step.number)
        values, pixels = arranged(step.scores, pixels_of(step.images), step.credit)
        save_sheet(path, pixels, {"step": step.number, "of": len(step.scores.samples), **values})
        thin(path.parent, step.number)

    def continued(self, run: Run, step: Step, scores: Scores, images: Sequence[Pending[Images]]) -> HeldOut | None:
        turns, number = self.config.episode.parsed, scores.samples[0].turn or 0
        written = self.config.episode.is_text(turns[0].role)
        if number == written:
            self.scores, self.pixels = Scores(), []
        self.scores.add(scores)
        self.pixels += pixels_of(images)
        if number < len(turns) - 1:
            return None
        episodes, pixels = self.scores, self.pixels
        run.picture(step.number, "validation_episode", episode_sheet(episodes, pixels))
        if written:
            episodes.add(texts_of(episodes, turns[0].role))
        ends = [scores.samples[i].prompt.id for i in shown_images(len(scores.samples), self.config.validation)]
        each = sum(sample.prompt.id == ends[0] for sample in episodes.samples)
        prompts = evenly(list(dict.fromkeys(ends)), max(1, HELD_OUT // each))
        values, shown = arranged(episodes, pixels, prompts=prompts)
        with self.saving():
            save_held_out(run, step.number, values, shown)
        self.scores, self.pixels = Scores(), []
        return None


def pixels_of(images: Sequence[Pending[Images]]) -> list[np.ndarray]:
    """Return the pixels of all images."""
    return [image for part in images for image in part.result().pixels]


def texts_of(scores: Scores, role: str) -> Scores:
    """Return the held-out texts that `role` wrote for the images of turn 1, without a reward of their own."""
    starts = [sample for sample in scores.samples if sample.turn == 1]
    samples = [
        replace(s, prompt=replace(s.prompt, turn=Turn(0, role)), index=s.branch or 0, turn=0, role=role, branch=None)
        for s in starts
    ]
    return Scores(samples, [None] * len(samples), {}, [[] for _ in samples])


def save_held_out(run: Run, step: int, values: Mapping[str, Any], pixels: Sequence[np.ndarray]) -> None:
    """Save the episodes of a validation; those of validations whose images were deleted are deleted, too."""
    folder = run.run_dir / EPISODES
    save_sheet(folder / f"episode_{step:06d}.json", pixels, {"step": step, **values})
    for path in folder.glob("episode_*.json"):
        number = path.stem.removeprefix("episode_")
        if int(number) < step and not (folder / f"step_{number}.npz").exists():
            for kind in ("json", "jpg"):
                path.with_suffix(f".{kind}").unlink(missing_ok=True)


# --- The turns of an episode as a tree: a group of images, and below some of them the groups that start from it


def arranged(
    scores: Scores,
    pixels: Sequence[np.ndarray],
    credit: torch.Tensor | None = None,
    prompts: Sequence[int] | None = None,
) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Return the values of a sheet of episodes, and its images: of `prompts`, else of as many as it has room for.

    `pixels`: of the first rows of `scores`; the other rows are texts. The groups of an episode follow each other, and a
    group follows the one that it starts from.
    """
    rows, count = list[int](), 0
    for of_prompt in _by_prompt(scores.samples, prompts):
        count += sum(row < len(pixels) for row in of_prompt)
        if rows and count > MAX_IMAGES:
            break
        rows += _ordered(of_prompt, scores.samples, pixels)[:MAX_IMAGES]
    groups: dict[Group, int] = {}
    places = {row: place for place, row in enumerate(rows)}
    values: dict[str, Any] = {"prompts": [], "turns": [], "images": []}
    written = {(s.prompt.id, s.branch): s.prompt.request for s in scores.samples if s.turn == 1}
    for row in rows:
        sample = scores.samples[row]
        if sample.group not in groups:
            groups[sample.group] = len(groups)
            start = _start(row, scores.samples, pixels)
            request = "" if row >= len(pixels) or sample.prompt.request == sample.prompt.text else sample.prompt.request
            values["prompts"].append(sample.prompt.text)
            values["turns"].append([sample.turn, sample.role, request, None if start is None else places[start]])
        advantage = None if credit is None else mean_advantage(credit[row])
        columns = {name: column[row] for name, column in scores.by_scorer.items()}
        text = [] if row < len(pixels) else [written[sample.prompt.id, sample.index]]
        entry = [groups[sample.group], sample.index, scores.totals[row], advantage, columns, *text]
        values["images"].append(entry)
    return values, [pixels[row] for row in rows if row < len(pixels)]


def _by_prompt(samples: Sequence[Sample], prompts: Sequence[int] | None) -> list[list[int]]:
    """Return the rows of each prompt, of `prompts` only if given."""
    rows: dict[int, list[int]] = {prompt: [] for prompt in prompts or ()}
    for row, sample in enumerate(samples):
        if prompts is None or sample.prompt.id in rows:
            rows.setdefault(sample.prompt.id, []).append(row)
    return list(rows.values())


def _ordered(rows: Sequence[int], samples: Sequence[Sample], pixels: Sequence[np.ndarray]) -> list[int]:
    """Order the rows of an episode: a group, then for each of its images the groups that start from it."""
    groups: dict[Group, list[int]] = {}
    for row in rows:
        groups.setdefault(samples[row].group, []).append(row)
    later: dict[int | None, list[list[int]]] = {}
    for members in groups.values():
        later.setdefault(_start(members[0], samples, pixels), []).append(members)

    def walk(start: int | None) -> Iterator[int]:
        for members in later.get(start, []):
            yield from members
            for row in members:
                yield from walk(row)

    return list(walk(None))


def _start(row: int, samples: Sequence[Sample], pixels: Sequence[np.ndarray]) -> int | None:
    """Return the row of the image or text that sample `row` starts from; None in the first turn."""
    prompt = samples[row].prompt
    if prompt.turn is None or prompt.turn.state is None:
        return None
    image, state = prompt.turn.image, prompt.turn.state
    before = [r for r, s in enumerate(samples) if s.prompt.id == prompt.id and s.turn == prompt.turn.number - 1]
    if image is None:  # a text
        return next((r for r in before if samples[r].index == state), None)
    # equal images: if each goes on, `state` is the place of its own
    return next(r for r in [*before[state : state + 1], *before] if np.array_equal(pixels[r], image))


# --- Sheets in `samples/`


def episode_sheet(scores: Scores, pixels: Sequence[np.ndarray]) -> Image.Image:
    """Draw the episodes of the first prompts, a row per prompt: an image of each turn, and the one it started from."""
    samples = scores.samples[: len(pixels)]
    last = max(sample.turn or 0 for sample in samples)
    ends: dict[int, int] = {}  # prompt -> row of an image of the last turn
    for row, sample in enumerate(samples):
        if (sample.turn or 0) == last:
            ends.setdefault(sample.prompt.id, row)
    chains = [_chain_to(row, samples, pixels) for row in list(ends.values())[:SHOWN]]
    places = [row for chain in chains for row in chain]
    captions = [described(samples[row].prompt, scores.totals[row]) for row in places]
    return grid([still(pixels[row]) for row in places], captions, columns=len(chains[0]))


def described(prompt: Prompt, total: float | None) -> str:
    """Return the caption of an image: its reward, and what the model was asked."""
    return f"{'' if total is None else f'{total:.2f} '}{prompt.request}"


def _chain_to(row: int, samples: Sequence[Sample], pixels: Sequence[np.ndarray]) -> list[int]:
    """Return the rows of the images from which image `row` was made, and itself, in the order of the turns."""
    chain = [row]
    while (start := _start(chain[0], samples, pixels)) is not None:
        chain.insert(0, start)
    return chain
