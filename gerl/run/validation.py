"""Validations on disk, comparison of the first and the last, and means with confidence intervals."""

import contextlib
import io
import json
import logging
import math
import re
import statistics
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from gerl.config.bounded_text import LARGE, MALFORMED, read_json, regular
from gerl.errors import GerlError
from gerl.utils.files import finite, write_file, writing
from gerl.utils.pages import Card, Picture, show, thumbnail

T = TypeVar("T")
JUDGED = ("own_error", "other_error")  # statistics of an image by the base model
RESAMPLES = 10_000
LARGEST = 2 << 30  # bytes of a validation's images; more is taken for a file made to fill the memory
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """Mean over `count` prompts with its confidence interval (`mean_interval`); NaN with too few prompts."""

    mean: float
    low: float
    high: float
    count: int


def interval(estimate: Estimate, sign: str = "") -> str:
    """Format the interval of an estimate."""
    return "-" if math.isnan(estimate.low) else f"{show(estimate.low, sign)} to {show(estimate.high, sign)}"


def estimate(
    prompt_ids: Sequence[int],
    values: Sequence[float | None],
    ends: tuple[float, float] | None = None,
    confidence: float = CONFIDENCE,
) -> Estimate:
    """Return mean and interval of `values` [N], one per image; None is left out.

    Images of the same prompt are averaged first: they are not independent. ends: see `mean_interval`.
    """
    prompts: dict[int, list[float]] = {}
    for i, value in zip(prompt_ids, values, strict=True):
        if value is not None:
            prompts.setdefault(i, []).append(value)
    means = [sum(members) / len(members) for members in prompts.values()]
    low, high = mean_interval([means], ends, confidence) if len(means) > 1 else (math.nan, math.nan)
    return Estimate(sum(means) / len(means) if means else math.nan, low, high, len(means))


def estimate_share(
    prompt_ids: Sequence[int], values: Sequence[float | None], confidence: float = CONFIDENCE
) -> Estimate:
    """Return mean and interval of successes or shares of them, `values` [N] from 0 to 1; None is left out.

    Wilson's interval if each prompt counts as 0 or 1, such as with one image per prompt; else that of `estimate`.
    """
    result = estimate(prompt_ids, values, (0.0, 1.0), confidence)
    prompts: dict[int, set[float]] = {}
    for i, value in zip(prompt_ids, values, strict=True):
        if value is not None:
            prompts.setdefault(i, set()).add(value)
    if result.count < 2 or not all(scores in ({0.0}, {1.0}) for scores in prompts.values()):
        return result
    return Estimate(result.mean, *wilson_interval(result.mean, result.count, confidence), result.count)


def estimate_gain(
    prompt_ids: Sequence[int],
    before: Sequence[float | None],
    after: Sequence[float | None],
    confidence: float = CONFIDENCE,
) -> Estimate:
    """Return mean and interval of `after` - `before` [N], over the images scored in both."""
    changes = differences(before, after)
    return estimate(prompt_ids, changes, gain_ends(known(changes), known(before) + known(after)), confidence)


def gain_ends(gains: Sequence[float], column: Sequence[float]) -> tuple[float, float] | None:
    """Return the `ends` of gains in `column`: without a change, only its values tell how large one may be."""
    if any(gains) or not column:
        return None
    reach = max(column) - min(column)
    return -reach, reach


def differences(before: Sequence[float | None], after: Sequence[float | None]) -> list[float | None]:
    """Return `after` - `before` [N], None where one is missing."""
    return [None if a is None or b is None else b - a for a, b in zip(before, after, strict=True)]


def mean_interval(
    groups: Sequence[Sequence[float]], ends: tuple[float, float] | None = None, confidence: float = CONFIDENCE
) -> tuple[float, float]:
    """Return the interval of the mean of the means of `groups`, of at least two values each.

    The union of two t intervals, with Welch's degrees of freedom for several groups. One is longer on the side of the
    skew (Johnson 1978, "Modified t tests and confidence intervals for asymmetrical populations"). The other holds where
    many values are equal: it counts `ends` as two more values, with the share of equal values as their weight (Agresti
    and Coull 1998 add two of each to a share). ends: the least and the largest value that others might have, by
    default both as far from 0 as the values reach; 0 and 1 also limit the interval.
    """
    reach = max(abs(value) for group in groups for value in group)
    ends = ends or (-reach, reach)
    samples = [np.asarray(group, dtype=np.float64) for group in groups]
    edges = []
    for tied in (False, True):
        moments = [_moments(sample, np.asarray(ends), _share_of_equals(sample) if tied else 0.0) for sample in samples]
        means, variances, skews = np.transpose(moments)
        mean, variance = float(means.mean()), float(variances.sum())
        if variance == 0:
            edges += [mean]
            continue
        freedom = variance**2 / sum(v**2 / (len(sample) - 1) for v, sample in zip(variances, samples, strict=True))
        quantile = t_quantile(confidence, int(freedom + 1e-9))
        lean = 0.0 if tied else float(skews.sum()) / variance**1.5 * (1 + 2 * quantile**2) / 6
        error = math.sqrt(variance) / len(samples)
        edges += [mean - error * (quantile + max(0.0, -lean)), mean + error * (quantile + max(0.0, lean))]
    low, high = min(edges), max(edges)
    return (max(low, 0.0), min(high, 1.0)) if ends == (0.0, 1.0) else (low, high)


def _moments(values: np.ndarray, ends: np.ndarray, weight: float) -> tuple[float, float, float]:
    """Return the mean of `values` [N] and of `ends` [2] with `weight` each, and its second and third cumulant."""
    weights = np.append(np.ones(len(values)), [weight, weight])
    count, both = weights.sum(), np.append(values, ends)
    mean = weights @ both / count
    squares, cubes = (weights @ (both - mean) ** power for power in (2, 3))
    third = cubes / ((count - 1) * (count - 2) * count) if count > 2 else 0.0
    return float(mean), float(squares / ((count - 1) * count)), float(third)


def _share_of_equals(values: np.ndarray) -> float:
    """Return the share of the values that equal the most frequent one, 0 if all differ and 1 if none does."""
    return float(np.unique(values, return_counts=True)[1].max() - 1) / (len(values) - 1)


@cache
def t_quantile(confidence: float, freedom: int) -> float:
    """Return t so that |T| < t has the probability `confidence`, for Student's T with `freedom` degrees of freedom.

    By bisection of the probability (Abramowitz and Stegun 1964, 26.7.3 and 26.7.4).
    """

    def probability(angle: float) -> float:  # of |T| < sqrt(freedom) * tan(angle)
        odd, total = freedom % 2, 0.0
        term = math.cos(angle) ** odd
        for power in range(odd, freedom - 1, 2):
            total += term
            term *= math.cos(angle) ** 2 * (power + 1) / (power + 2)
        total *= math.sin(angle)
        return 2 / math.pi * (angle + total) if odd else total

    return math.sqrt(freedom) * math.tan(_bisect(lambda angle: probability(angle) < confidence, math.pi / 2))


def _bisect(too_small: Callable[[float], bool], high: float) -> float:
    """Return the largest number from 0 to `high` that is too small."""
    low = 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if too_small(middle) else (low, middle)
    return low


def bootstrap(values: Sequence[float], confidence: float = CONFIDENCE, seed: int = 0) -> tuple[float, float]:
    """Percentile interval of the mean of `values` [N] (Efron and Tibshirani 1993, section 13.3).

    The ends are quantiles of the means of 10,000 resamples of size N, with a fixed seed. Too narrow for few values.
    """
    generator, data = np.random.default_rng(seed), np.asarray(values, dtype=np.float64)
    chunk = max(1, 2**20 // len(data))  # resamples at a time, to bound the memory
    sizes = [(min(chunk, RESAMPLES - start), len(data)) for start in range(0, RESAMPLES, chunk)]
    means = np.concatenate([data[generator.integers(len(data), size=size)].mean(axis=1) for size in sizes])
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def wilson_interval(share: float, total: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return the score interval of a share of `total` independent trials (Wilson 1927)."""
    z = statistics.NormalDist().inv_cdf((1 + confidence) / 2)
    middle = share + z * z / (2 * total)
    reach = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    scale = 1 + z * z / total
    return max(0.0, (middle - reach) / scale), min(1.0, (middle + reach) / scale)


def share_interval(count: int, total: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return the exact interval of the share `count / total` (Clopper and Pearson 1934), by bisection."""
    rare = (1 - confidence) / 2

    def chance(p: float, k: int) -> float:
        ways = math.lgamma(total + 1) - math.lgamma(k + 1) - math.lgamma(total - k + 1)
        return math.exp(ways + k * math.log(p) + (total - k) * math.log1p(-p))

    def tail(p: float, low: int, high: int) -> float:
        return sum(chance(p, k) for k in range(low, high + 1))

    first = 0.0 if count == 0 else _bisect(lambda p: tail(p, count, total) < rare, 1.0)
    last = 1.0 if count == total else _bisect(lambda p: tail(p, 0, count) > rare, 1.0)
    return first, last


# --- Validations on disk: rewards of all held-out prompts, images of some

log = logging.getLogger(__name__)
# raised by JSON and numpy for truncated, overwritten and other files
DAMAGED = (
    *(OSError, *MALFORMED, EOFError, RuntimeError, MemoryError, struct.error, zipfile.BadZipFile, zlib.error),
)  # fmt: skip


Score = Annotated[float, Field(ge=-LARGE, le=LARGE)]  # neither NaN nor infinite, and its square is a float


@dataclass(frozen=True)
class SamplingRecord:
    """How the images of a validation were sampled, apart from the settings in config.yaml."""

    seeds: list[int]  # [P] seeds of the initial noise
    given: list[dict[str, Any]]  # [P] image arguments of the pipeline, by file
    device: str
    video: bool = False  # an image shows some frames of a video side by side
    scheduler: str | None = None  # the pipeline's own scheduler, if the run replaced it
    lora_lines: list[str] = field(default_factory=list)  # Python that loads the LoRA in FOLDER, if unusual
    components: list[str] = field(default_factory=list)  # Python arguments for components left out or replaced


@dataclass(frozen=True)
class Validation:
    """A validation: rewards of N held-out images (None: not scored), and P of the images."""

    __pydantic_config__ = ConfigDict(arbitrary_types_allowed=True)

    step: int
    prompts: list[str]  # [N]
    rewards: list[Score | None]  # [N]
    by_scorer: dict[str, list[Score | None]]  # scorer -> [N]
    shown: list[int]  # [P] increasing indices of the stored images
    pixels: list[np.ndarray]  # [P] of [H, W, 3] uint8
    drawing: SamplingRecord | None = None  # None once the images are deleted
    ids: list[int] = field(default_factory=list)  # [N] index of each image's prompt; empty: one image per prompt
    # statistic -> [N], see `gerl.workers.image_statistics`
    looks: dict[str, list[Score | None]] = field(default_factory=dict)

    @cached_property
    def first_rows(self) -> list[int]:
        """Index of the first image of each prompt."""
        firsts: dict[int, int] = {}
        for row, number in enumerate(self.ids or range(len(self.prompts))):
            firsts.setdefault(number, row)
        return list(firsts.values())

    @property
    def each(self) -> int:
        """Number of images per prompt."""
        return len(self.prompts) // max(len(self.first_rows), 1)

    def part(self, rows: Sequence[int]) -> "Validation":
        """Return some rows, with their numbers as `ids`, without images and without what compares them with others."""

        def chosen(columns: Mapping[str, Sequence[float | None]]) -> dict[str, list[float | None]]:
            return {name: [values[row] for row in rows] for name, values in columns.items()}

        prompts, rewards = [self.prompts[row] for row in rows], [self.rewards[row] for row in rows]
        by_scorer, looks = chosen(self.by_scorer), chosen(self.looks)
        looks = {name: values for name, values in looks.items() if not name.startswith("unlike_")}
        return Validation(self.step, prompts, rewards, by_scorer, [], [], None, list(rows), looks)

    def by_prompt(self, values: Sequence[float | None]) -> list[float | None]:
        """Return the mean of `values` [N] over the images of each prompt, without missing values."""
        groups: dict[int, list[float | None]] = {}
        for i, value in zip(self.ids or range(len(self.prompts)), values, strict=True):
            groups.setdefault(i, []).append(value)
        return [mean(group) for group in groups.values()]


VALIDATION = TypeAdapter(Validation)


def save_validation(
    run_dir: Path,
    step: int,
    prompts: Sequence[str],
    pixels: Sequence[np.ndarray] | np.ndarray,
    totals: Sequence[float | None],
    by_scorer: Mapping[str, Sequence[float | None]],
    shown: Sequence[int] | None = None,
    drawing: SamplingRecord | None = None,
    ids: Sequence[int] = (),
    looks: Mapping[str, Sequence[float | None]] | None = None,
    name: str = "step",
) -> None:
    """Save a validation as `validation/step_N.json` and `.npz`, a look as `look_N`.

    pixels: `[H, W, 3]` uint8 of the images `shown`, by default the first ones. ids, looks: as in `Validation`. Raises
    `GerlError` if it cannot be written.
    """
    chosen = list(range(len(pixels))) if shown is None else list(shown)
    if any(image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8 for image in pixels):
        raise ValueError(f"pixels: expected [H, W, 3] uint8 each, got {[(i.shape, i.dtype) for i in pixels][:3]}")
    if len(chosen) != len(pixels) or chosen != sorted(set(chosen)) or (chosen and chosen[-1] >= len(prompts)):
        raise ValueError(f"shown: expected increasing indices of {len(prompts)} images, one per picture, got {chosen}")
    if any(len(values) != len(prompts) for values in (totals, *by_scorer.values())):
        raise ValueError(f"expected {len(prompts)} rewards of each scorer, one per image")
    values: dict[str, Any] = {"step": step, "rewards": totals, "by_scorer": by_scorer, "prompts": prompts}
    values |= {"shown": chosen, "drawing": None if drawing is None else asdict(drawing), "ids": list(ids)}
    values["looks"] = dict(looks or {})
    if len({image.shape for image in pixels}) == 1:
        arrays = {"pixels": np.stack(list(pixels))}
    else:
        arrays = {f"picture_{i}": image for i, image in enumerate(pixels)}
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]  # numpy 2.0 has no allow_pickle
    path = _path(run_dir, step, name)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    # the JSON is written last: if it exists, the images are complete
    if len(pixels):
        write_file(path.with_suffix(".npz"), buffer.getvalue())
    write_file(path, json.dumps(finite(values)))


def remove_images(run_dir: Path, newest: int, rank: Callable[[Validation], float | None] | None = None) -> None:
    """Delete the images of all validations but the first, the best and the `newest` last ones; rewards stay.

    The best has the highest `rank`, by default its mean reward. A damaged one is left as it is. Raises `GerlError` if a
    file cannot be written or deleted.
    """
    ranks: dict[int, float] = {}
    for step in validation_steps(run_dir):
        if (_path(run_dir, step).with_suffix(".npz")).exists():
            with contextlib.suppress(GerlError):
                validation = load_validation(run_dir, step, pictures=False)
                by_reward = None if None in validation.rewards else mean(validation.rewards) or 0.0
                value = by_reward if rank is None else rank(validation)
                ranks[step] = -math.inf if value is None else value
    steps = sorted(ranks)
    best = max(steps, key=lambda step: (ranks[step], step), default=0)
    for step in set(steps) - {*steps[:1], best, *steps[-newest:]}:
        path = _path(run_dir, step)
        values = read_json(path)
        write_file(path, json.dumps({**values, "shown": [], "drawing": None}))  # complete at any moment
        with writing(path.with_suffix(".npz")):
            path.with_suffix(".npz").unlink()


def load_validation(run_dir: Path, step: int, pictures: bool = True, name: str = "step") -> Validation:
    """Load a validation, or a look, with pixels if `pictures`; raises `GerlError` if it is missing or damaged."""
    path = _path(run_dir, step, name)
    try:
        values = read_json(path)
        pixels = _read_pixels(path.with_suffix(".npz")) if pictures and values.get("shown") != [] else []
        validation = VALIDATION.validate_python({**values, "pixels": pixels})
    except (*DAMAGED, ValidationError) as error:
        problem = " ".join(str(error).split())[:200] or type(error).__name__
        raise GerlError(f"the validation {path} cannot be read ({problem}); delete it to skip it") from error
    lengths = {
        len(column) for column in (validation.rewards, *validation.by_scorer.values(), *validation.looks.values())
    }
    if lengths | {len(validation.ids or validation.prompts)} != {len(validation.prompts)}:
        raise GerlError(f"the validation {path} does not have one reward per image; delete it to skip it")
    listed = len(validation.shown) == len(pixels) and all(0 <= i < len(validation.prompts) for i in validation.shown)
    if pictures and not listed:
        raise GerlError(f"the validation {path} has other images than it lists; delete it to skip it")
    return validation


def _read_pixels(path: Path) -> list[np.ndarray]:
    """Return the images of a validation; raises an error of `DAMAGED`."""
    with np.load(regular(path), allow_pickle=False) as arrays:
        if (size := sum(entry.file_size for entry in arrays.zip.infolist())) > LARGEST:
            raise ValueError(f"its images take {size / 1e9:.1f} GB")
        images = arrays["pixels"] if "pixels" in arrays else [arrays[f"picture_{i}"] for i in range(len(arrays.files))]
    pixels = [] if isinstance(images, bytes) else list(images)  # bytes: of an entry without an array
    if not all(isinstance(p, np.ndarray) and p.shape[2:] == (3,) and p.dtype == np.uint8 for p in pixels):
        raise ValueError("it has other arrays than images")
    return pixels


def load_validations(run_dir: Path) -> list[Validation]:
    """Load all validations of a run that are not damaged, in order, with the images of the first and the last only."""
    validations: dict[int, Validation] = {}
    for step in validation_steps(run_dir):
        _keep(validations, run_dir, step, pictures=False)
    for place in (0, -1):
        while validations and not _keep(validations, run_dir, sorted(validations)[place], pictures=True):
            pass  # damaged: try the next one
    return [validations[step] for step in sorted(validations)]


def _keep(validations: dict[int, Validation], run_dir: Path, step: int, pictures: bool) -> bool:
    """Load a validation into `validations`, or remove it if it is damaged; returns whether it is there."""
    try:
        validations[step] = load_validation(run_dir, step, pictures)
    except GerlError as error:
        log.warning("%s", error)
        validations.pop(step, None)
    return step in validations


def paired_gains(first: Validation, later: Validation) -> dict[str, Estimate]:
    """Return column (`reward`, a scorer's, or of `judged`) -> gain in `later`, over the prompts of both validations.

    Counts only images scored in both, which start from the same noise.
    """
    if first.prompts != later.prompts or first.ids != later.ids:
        return {}
    ids = first.ids or range(len(first.prompts))
    columns = {"reward": (first.rewards, later.rewards)}
    both = [name for name in first.by_scorer if name in later.by_scorer]
    columns |= {name: (first.by_scorer[name], later.by_scorer[name]) for name in both}
    judgement = judged(later, first)
    columns |= {name: (values, judgement.get(name, [])) for name, values in judged(first, first).items()}
    return {
        name: estimate_gain(ids, before, after)
        for name, (before, after) in columns.items()
        if len(before) == len(after) and known(differences(before, after))
    }


def judged(validation: Validation, first: Validation) -> dict[str, list[float | None]]:
    """Return the judgement of the base model as columns, from its errors (`gerl.workers.base_judge`), if there are any.

    `base/alignment`: log((other + c) / (own + c)), the evidence for an image's own prompt against another one, from the
    errors under either. c, the mean of `own` over the `first` validation of the run, keeps traces in the latents that
    no eye sees from counting. `base/surprise`: log(own), how unlikely the image is.
    """
    unknown: list[float | None] = [None] * len(validation.prompts)
    under_prompt, other = (validation.looks.get(name, unknown) for name in JUDGED)
    floor = mean(first.looks.get(JUDGED[0], []))
    if floor is None:
        return {}
    pairs = zip(under_prompt, other, strict=True)
    alignment = [None if a is None or b is None else math.log((b + floor) / (a + floor)) for a, b in pairs]
    surprise = [None if a is None else math.log(a) for a in under_prompt]
    columns = {"base/alignment": alignment, "base/surprise": surprise}
    return {name: values for name, values in columns.items() if known(values)}


def validation_steps(run_dir: Path, name: str = "step") -> list[int]:
    """Return the trainer steps with a validation on disk, in order; name: `look` for those with a look."""
    names = (re.fullmatch(rf"{name}_(\d+)\.json", p.name) for p in (run_dir / "validation").glob(f"{name}_*.json"))
    return sorted(int(match[1]) for match in names if match)


def held_out_words(images: int, each: int) -> str:
    """Name a number of held-out images, `each` per prompt."""
    return f"{images} held-out prompts" if each == 1 else f"{images} images of {images // each} held-out prompts"


def known(values: Iterable[float | None]) -> list[float]:
    """Return the values that are not None."""
    return [value for value in values if value is not None]


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the known values."""
    return statistics.fmean(scored) if (scored := known(values)) else None


def standard_error(values: Iterable[float | None]) -> float | None:
    """Return the standard error of the mean of the known values; None for fewer than two."""
    scored = known(values)
    return statistics.stdev(scored) / math.sqrt(len(scored)) if len(scored) > 1 else None


def _path(run_dir: Path, step: int, name: str = "step") -> Path:
    return run_dir / "validation" / f"{name}_{step:06d}.json"


# --- Comparison of the first and the last validation: gains by prompt, with images

SMALL = 256  # pixels; images up to this width are lossless and shown with sharp pixels
EQUAL = 5e-4  # rewards closer than this are equal at three digits
FEATURED, LOSSES = 4, 5


@dataclass(frozen=True)
class Gain:
    """A held-out prompt with its mean rewards before and after; None: not scored."""

    index: int  # index of its first image
    prompt: str
    before: float | None
    after: float | None

    @property
    def value(self) -> float | None:
        """Gain in reward."""
        return None if self.before is None or self.after is None else self.after - self.before

    @property
    def trend(self) -> str:
        """`up`, `down` or `flat`; `flat` also if unknown."""
        return "flat" if self.value is None or abs(self.value) < EQUAL else "up" if self.value > 0 else "down"


@dataclass(frozen=True)
class Section:
    """Cards under a heading; `name` is its anchor."""

    name: str
    title: str
    cards: Sequence[Card]


@dataclass(frozen=True)
class BeforeAfter:
    """Comparison of two validations; without `last` there is nothing to compare yet."""

    first: Validation
    last: Validation | None
    doubtful: bool = False  # whether a gain in reward may be none: `better` is not said of it

    @property
    def words(self) -> tuple[str, str]:
        """What a prompt with a gain is called, and one with a loss."""
        return ("rose", "fell") if self.doubtful else ("better", "worse")

    @cached_property
    def gains(self) -> list[Gain]:
        """Gains of the prompts that both have at the same index."""
        first, other = self.first, self.last or self.first
        before, after = (one.by_prompt(one.rewards) for one in (first, other))
        rows = zip(first.first_rows, other.first_rows, before, after, strict=False)
        return [Gain(i, first.prompts[i], a, b) for i, j, a, b in rows if first.prompts[i] == other.prompts[j]]

    @cached_property
    def pictured(self) -> list[Gain]:
        """Gains of the prompts with an image in both."""
        shown = set(self.first.shown) & set((self.last or self.first).shown)
        return [gain for gain in self.gains if gain.index in shown]

    @cached_property
    def known(self) -> list[float]:
        """Gains of the prompts scored in both."""
        return known(gain.value for gain in self.gains)

    @property
    def counts(self) -> str:
        """Describe how many held-out prompts gained and lost."""
        trends = [gain.trend for gain in self.gains if gain.value is not None]
        better, equal, worse = (trends.count(trend) for trend in ("up", "flat", "down"))
        missing = len(self.gains) - len(trends)
        note = f", {missing} without a reward" if missing else ""
        up, down = self.words
        return f"{better} {up}, {equal} equal, {worse} {down} of {len(self.gains)} held-out prompts{note}"

    @cached_property
    def featured(self) -> list[Card]:
        """Pairs for the top of the page, evenly spaced over the file regardless of gain."""
        return [self._card(gain) for gain in evenly(self.pictured, FEATURED)]

    @cached_property
    def sections(self) -> list[Section]:
        """All pairs with images: better, worse, each with the largest change first, and the rest."""
        if self.last is None or not self.known:
            return [Section("all", "", list(map(self._card, self.pictured)))] if self.pictured else []
        sections = []
        for trend, name in zip(("up", "down", "flat"), (*self.words, "equal"), strict=True):
            chosen = sorted((g for g in self.pictured if g.trend == trend), key=lambda g: -abs(g.value or 0.0))
            order = ", largest change first" if trend != "flat" and chosen[1:] else ""
            title = f"{len(chosen)} {name} of the {len(self.pictured)} shown{order}"
            sections += [Section(name, title, list(map(self._card, chosen)))] if chosen else []
        return sections

    @cached_property
    def losses(self) -> list[Gain]:
        """The held-out prompts with the largest losses."""
        down = [gain for gain in self.gains if gain.trend == "down"]
        return sorted(down, key=lambda gain: gain.value or 0.0)[:LOSSES]

    def _card(self, gain: Gain) -> Card:
        pictures, i = [], gain.index
        for one in (v for v in (self.first, self.last) if v is not None):
            reward = "not scored" if (value := one.rewards[i]) is None else f"{value:.3f}"
            uri = thumbnail(one.pixels[one.shown.index(i)], width=384, exact=SMALL)
            pictures.append(Picture(uri, f"{one.prompts[i]}, reward {reward}", note=reward))
        change = "" if self.last is None or gain.value is None else f"{gain.value:+z.3f}"
        trend = gain.trend if self.last is not None else "flat"
        return Card(pictures, (), gain.prompt, gain=change, trend=trend)


def evenly(values: Sequence[T], count: int) -> list[T]:
    """Return at most `count` of the values, evenly spaced, with the first one."""
    count = min(count, len(values))
    return [values[k * len(values) // count] for k in range(count)]
