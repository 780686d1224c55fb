"""Variants of a model on the same prompts and noise: what is drawn, and how far its scores are apart."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gerl.algorithms.planning import validation_seed
from gerl.evaluate.names import BASE
from gerl.pages.images import thumbnail
from gerl.protocol import Images, Sample, Scores
from gerl.rewards.total import TOTAL, row_of
from gerl.run.validation import Estimate, estimate
from gerl.utils.condition_images import pictures_of

FEW_PROMPTS = 20  # with fewer the percentile interval is clearly too narrow
WIDTH = 384  # pixels, to which a wider picture is reduced


@dataclass(frozen=True)
class Drawn:
    """Image number `index` of a prompt, drawn by `variant` from the noise of `seed`; `picture` is a data URI.

    values: column -> score, None where there is none; `failure` says why. given: files of the prompt's own pictures.
    """

    prompt_id: int
    prompt: str
    index: int
    seed: int
    variant: str
    values: dict[str, float | None]
    failure: str = ""
    picture: str = ""
    given: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """How a message calls it."""
        return f"the image of {self.variant} for {self.prompt!r}"


@dataclass(frozen=True)
class Result:
    """A column of a variant: its mean, how much it is above that of the base, and how often an image of it wins.

    The last two are over prompts of which both have a score, on the same noise; a tie is half a win.
    """

    mean: Estimate
    difference: Estimate | None = None
    win_rate: Estimate | None = None


Results = dict[str, dict[str, Result]]  # column -> variant -> result
Task = tuple[str, list[Sample]]  # a variant and the micro-batch that it draws


def plan(batch: Sequence[Sample], variants: Sequence[str], images: int, each: int = 1) -> list[Task]:
    """The images to draw for a micro-batch of the trainer's validation: `images` of each prompt with every variant.

    each: how many images of a prompt the validation draws, which have its noise and, in their micro-batch, its
    neighbours: the last bits of an image depend on both. Images of different variants are no group.
    """
    tasks = []
    for first in range(0, images, each):
        chosen = [(sample, sample.index + first) for sample in batch if sample.index + first < images]
        samples = [replace(sample, index=k, seed=validation_seed(sample.prompt, k)) for sample, k in chosen]
        tasks += [(variant, [replace(sample, role=variant) for sample in samples]) for variant in variants if samples]
    return tasks


def drawn(variant: str, samples: Sequence[Sample], scores: Scores, images: Images) -> list[Drawn]:
    """The rows of a micro-batch."""
    rows = []
    for i, sample in enumerate(samples):
        place = (sample.prompt.id, sample.prompt.text, sample.index, sample.seed, variant)
        rows.append(Drawn(*place, *row_of(scores, i), thumbnail(images.pixels[i], WIDTH), pictures_of(sample.prompt)))
    return rows


def compare(rows: Sequence[Drawn]) -> Results:
    """The results of every column, for each variant in order of appearance."""
    variants = list(dict.fromkeys(row.variant for row in rows))
    places = list(dict.fromkeys((row.prompt_id, row.index) for row in rows))
    ids = [prompt_id for prompt_id, _ in places]
    cells = {(row.variant, row.prompt_id, row.index): row.values for row in rows}
    results: Results = {}
    for column in columns(rows):
        scores = {v: [cells.get((v, *place), {}).get(column) for place in places] for v in variants}
        results[column] = {
            v: Result(
                estimate(ids, scores[v]),
                estimate(ids, _paired(lambda own, base: own - base, scores[v], scores[BASE])) if v != BASE else None,
                estimate(ids, _paired(_win, scores[v], scores[BASE])) if v != BASE else None,
            )
            for v in variants
        }
    return results


def columns(rows: Sequence[Drawn]) -> list[str]:
    """The columns that any row has, the total first."""
    return list(dict.fromkeys([TOTAL, *(name for row in rows for name in row.values)]))


def _paired(
    function: Callable[[float, float], float], own: Sequence[float | None], base: Sequence[float | None]
) -> list[float | None]:
    return [None if a is None or b is None else function(a, b) for a, b in zip(own, base, strict=True)]


def _win(own: float, base: float) -> float:
    return 1.0 if own > base else 0.5 if own == base else 0.0
