"""Variants of a model on the same prompts and noise: what is drawn, and how far its scores are apart."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gerl.algorithms.planning import VALIDATION_SEED
from gerl.evaluate.names import BASE
from gerl.pages.images import thumbnail
from gerl.protocol import Images, Sample, Scores
from gerl.rewards.rows import TOTAL, row_of
from gerl.utils.condition_images import pictures_of
from gerl.utils.seeding import derive_seed

RESAMPLES = 10_000
CONFIDENCE = 0.95
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
class Estimate:
    """A mean over `count` prompts with its 95 % confidence interval; NaN where there are too few prompts for it."""

    mean: float
    low: float
    high: float
    count: int


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


def plan(batch: Sequence[Sample], variants: Sequence[str], images: int) -> list[Task]:
    """The images to draw for a micro-batch of the trainer's validation: `images` of each prompt with every variant.

    The first image of a prompt has the noise, and in its micro-batch the neighbours, of the trainer's: the last bits of
    an image depend on both. Images of different variants are no group.
    """
    return [
        (variant, [replace(sample, index=k, seed=_noise(sample, k), role=variant) for sample in batch])
        for k in range(images)
        for variant in variants
    ]


def _noise(sample: Sample, k: int) -> int:
    """The seed of image `k` of a prompt; `sample` is that of the trainer's validation."""
    return derive_seed("validation", VALIDATION_SEED, sample.prompt.id, k) if k else sample.seed


def drawn(variant: str, samples: Sequence[Sample], scores: Scores, images: Images) -> list[Drawn]:
    """The rows of a micro-batch."""
    rows = []
    for i, sample in enumerate(samples):
        place = (sample.prompt.id, sample.prompt.text, sample.index, sample.seed, variant)
        rows.append(Drawn(*place, *row_of(scores, i), thumbnail(images.pixels[i], WIDTH), pictures_of(sample.prompt)))
    return rows


def bootstrap(values: Sequence[float], confidence: float = CONFIDENCE, seed: int = 0) -> tuple[float, float]:
    """The percentile interval of the mean of `values` [N] (Efron and Tibshirani 1993, section 13.3).

    The ends are quantiles of the means of 10,000 samples of size N drawn with replacement from `values`; the same for
    the same values.
    """
    return bootstrap_groups([values], confidence, seed)


def bootstrap_groups(
    groups: Sequence[Sequence[float]], confidence: float = CONFIDENCE, seed: int = 0
) -> tuple[float, float]:
    """As `bootstrap`, of the mean of the means of `groups`, each of which is resampled by itself."""
    generator = np.random.default_rng(seed)
    means = np.mean([_resampled(np.asarray(group, dtype=np.float64), generator) for group in groups], axis=0)
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def _resampled(data: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """The means of samples of the size of `data` [N], drawn from it with replacement [RESAMPLES]."""
    chunk = max(1, 2**20 // len(data))  # resamples at a time, to bound the memory
    sizes = [min(chunk, RESAMPLES - start) for start in range(0, RESAMPLES, chunk)]
    means = [data[generator.integers(len(data), size=(size, len(data)))].mean(axis=1) for size in sizes]
    return np.concatenate(means)


def estimate(prompt_ids: Sequence[int], values: Sequence[float | None]) -> Estimate:
    """Mean and interval of `values` [N], one for each image; those that are None are left out.

    Images of the same prompt are averaged first: they are not independent, so prompts are what is resampled.
    """
    prompts: dict[int, list[float]] = {}
    for i, value in zip(prompt_ids, values, strict=True):
        if value is not None:
            prompts.setdefault(i, []).append(value)
    means = [sum(members) / len(members) for members in prompts.values()]
    low, high = bootstrap(means) if len(means) > 1 else (math.nan, math.nan)
    return Estimate(sum(means) / len(means) if means else math.nan, low, high, len(means))


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
