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
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from pydantic import ConfigDict, TypeAdapter, ValidationError

from gerl.errors import GerlError
from gerl.utils.files import finite, write_file, writing
from gerl.web.pages import Card, Picture, thumbnail

T = TypeVar("T")
RESAMPLES = 10_000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """Mean over `count` prompts with its 95 % confidence interval; NaN with too few prompts."""

    mean: float
    low: float
    high: float
    count: int


def bootstrap(values: Sequence[float], confidence: float = CONFIDENCE, seed: int = 0) -> tuple[float, float]:
    """Percentile interval of the mean of `values` [N] (Efron and Tibshirani 1993, section 13.3).

    The ends are quantiles of the means of 10,000 resamples of size N, with a fixed seed.
    """
    return bootstrap_groups([values], confidence, seed)


def bootstrap_groups(
    groups: Sequence[Sequence[float]], confidence: float = CONFIDENCE, seed: int = 0
) -> tuple[float, float]:
    """Percentile interval of the mean of the means of `groups`, each resampled separately."""
    generator = np.random.default_rng(seed)
    means = []
    for data in (np.asarray(group, dtype=np.float64) for group in groups):
        chunk = max(1, 2**20 // len(data))  # resamples at a time, to bound the memory
        sizes = [(min(chunk, RESAMPLES - start), len(data)) for start in range(0, RESAMPLES, chunk)]
        means.append(np.concatenate([data[generator.integers(len(data), size=size)].mean(axis=1) for size in sizes]))
    low, high = np.quantile(np.mean(means, axis=0), [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def estimate(prompt_ids: Sequence[int], values: Sequence[float | None]) -> Estimate:
    """Return mean and interval of `values` [N], one per image; None is left out.

    Images of the same prompt are averaged first: they are not independent, so prompts are resampled.
    """
    prompts: dict[int, list[float]] = {}
    for i, value in zip(prompt_ids, values, strict=True):
        if value is not None:
            prompts.setdefault(i, []).append(value)
    means = [sum(members) / len(members) for members in prompts.values()]
    low, high = bootstrap(means) if len(means) > 1 else (math.nan, math.nan)
    return Estimate(sum(means) / len(means) if means else math.nan, low, high, len(means))


def share_interval(count: int, total: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return the exact interval of the share `count / total` (Clopper and Pearson 1934), by bisection."""
    rare = (1 - confidence) / 2

    def tail(p: float, low: int, high: int) -> float:
        return sum(math.comb(total, k) * p**k * (1 - p) ** (total - k) for k in range(low, high + 1))

    def solve(too_small: Callable[[float], bool]) -> float:
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if too_small(middle) else (low, middle)
        return low

    first = 0.0 if count == 0 else solve(lambda p: tail(p, count, total) < rare)
    last = 1.0 if count == total else solve(lambda p: tail(p, 0, count) > rare)
    return first, last


# --- Validations on disk: rewards of all held-out prompts, images of some

log = logging.getLogger(__name__)
# raised by JSON and numpy for truncated, overwritten and other files
DAMAGED = (
    OSError, ValueError, KeyError, TypeError, EOFError, RuntimeError, MemoryError, struct.error, zipfile.BadZipFile,
    zlib.error,
)  # fmt: skip


@dataclass(frozen=True)
class SamplingRecord:
    """How the images of a validation were sampled, apart from the settings in config.yaml."""

    seeds: list[int]  # [P] seeds of the initial noise
    given: list[dict[str, Any]]  # [P] image arguments of the pipeline, by file
    device: str
    video: bool = False  # an image shows some frames of a video side by side
    scheduler: str | None = None  # the pipeline's own scheduler, if the run replaced it
    lora_lines: list[str] = field(default_factory=list)  # Python that loads the LoRA in FOLDER, if unusual


@dataclass(frozen=True)
class Validation:
    """A validation: rewards of N held-out images (None: not scored), and P of the images."""

    __pydantic_config__ = ConfigDict(arbitrary_types_allowed=True)

    step: int
    prompts: list[str]  # [N]
    rewards: list[float | None]  # [N]
    by_scorer: dict[str, list[float | None]]  # scorer -> [N]
    shown: list[int]  # [P] increasing indices of the stored images
    pixels: list[np.ndarray]  # [P] of [H, W, 3] uint8
    drawing: SamplingRecord | None = None  # None once the images are deleted
    ids: list[int] = field(default_factory=list)  # [N] index of each image's prompt; empty: one image per prompt
    # statistic -> [N], see `gerl.workers.image_statistics`
    looks: dict[str, list[float | None]] = field(default_factory=dict)

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
) -> None:
    """Save a validation as `validation/step_N.json` and `.npz`.

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
    np.savez_compressed(buffer, allow_pickle=False, **arrays)
    path = _path(run_dir, step)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    # the JSON is written last: if it exists, the images are complete
    write_file(path.with_suffix(".npz"), buffer.getvalue())
    write_file(path, json.dumps(finite(values)))


def remove_images(run_dir: Path, newest: int) -> None:
    """Delete the images of all validations but the first, the best and the `newest` last ones; rewards stay.

    A damaged one is left as it is. Raises `GerlError` if a file cannot be written or deleted.
    """
    means: dict[int, float] = {}
    for step in validation_steps(run_dir):
        if (_path(run_dir, step).with_suffix(".npz")).exists():
            with contextlib.suppress(GerlError):
                rewards = load_validation(run_dir, step, pictures=False).rewards
                means[step] = -math.inf if None in rewards else mean(rewards) or 0.0
    steps = sorted(means)
    best = max(steps, key=lambda step: (means[step], step), default=0)
    for step in set(steps) - {*steps[:1], best, *steps[-newest:]}:
        path = _path(run_dir, step)
        values = json.loads(path.read_bytes())
        write_file(path, json.dumps({**values, "shown": [], "drawing": None}))  # complete at any moment
        with writing(path.with_suffix(".npz")):
            path.with_suffix(".npz").unlink()


def load_validation(run_dir: Path, step: int, pictures: bool = True) -> Validation:
    """Load the validation of `step`, with pixels if `pictures`; raises `GerlError` if it is missing or damaged."""
    path = _path(run_dir, step)
    try:
        values = json.loads(path.read_bytes())
        pixels = []
        if pictures and values.get("shown") != []:
            with np.load(path.with_suffix(".npz"), allow_pickle=False) as arrays:
                separate = (arrays[f"picture_{i}"] for i in range(len(arrays.files)))
                pixels = list(arrays.get("pixels", separate))
        found = VALIDATION.validate_python({**values, "pixels": pixels})
    except (*DAMAGED, ValidationError) as error:
        said = " ".join(str(error).split())[:200] or type(error).__name__
        raise GerlError(f"the validation {path} cannot be read ({said}); delete it to skip it") from error
    lengths = {len(column) for column in (found.rewards, *found.by_scorer.values(), *found.looks.values())}
    if lengths | {len(found.ids or found.prompts)} != {len(found.prompts)}:
        raise GerlError(f"the validation {path} does not have one reward per image; delete it to skip it")
    images = all(image.ndim == 3 and image.shape[2] == 3 and image.dtype == np.uint8 for image in pixels)
    listed = len(found.shown) == len(pixels) and all(0 <= i < len(found.prompts) for i in found.shown)
    if pictures and not (images and listed):
        raise GerlError(f"the validation {path} has other images than it lists; delete it to skip it")
    return found


def load_validations(run_dir: Path) -> list[Validation]:
    """Load all validations of a run that are not damaged, in order, with the images of the first and the last only."""
    found: dict[int, Validation] = {}
    for step in validation_steps(run_dir):
        _keep(found, run_dir, step, pictures=False)
    for place in (0, -1):
        while found and not _keep(found, run_dir, sorted(found)[place], pictures=True):
            pass  # damaged: try the next one
    return [found[step] for step in sorted(found)]


def _keep(found: dict[int, Validation], run_dir: Path, step: int, pictures: bool) -> bool:
    """Load a validation into `found`, or remove it if it is damaged; returns whether it is there."""
    try:
        found[step] = load_validation(run_dir, step, pictures)
    except GerlError as error:
        log.warning("%s", error)
        found.pop(step, None)
    return step in found


def paired_gains(first: Validation, later: Validation) -> dict[str, Estimate]:
    """Return column (`reward`, or a scorer's) -> gain in `later`, over the prompts of both validations.

    Counts only images scored in both, which start from the same noise.
    """
    if first.prompts != later.prompts or first.ids != later.ids:
        return {}
    ids = first.ids or range(len(first.prompts))
    columns = {"reward": (first.rewards, later.rewards)}
    both = [name for name in first.by_scorer if name in later.by_scorer]
    columns |= {name: (first.by_scorer[name], later.by_scorer[name]) for name in both}
    found = {}
    for name, pairs in columns.items():
        gains = [None if a is None or b is None else b - a for a, b in zip(*pairs, strict=True)]
        if any(gain is not None for gain in gains):
            found[name] = estimate(ids, gains)
    return found


def validation_steps(run_dir: Path) -> list[int]:
    """Return the trainer steps with a validation on disk, in order."""
    names = (re.fullmatch(r"step_(\d+)\.json", p.name) for p in (run_dir / "validation").glob("step_*.json"))
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


def _path(run_dir: Path, step: int) -> Path:
    return run_dir / "validation" / f"step_{step:06d}.json"


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
        return f"{better} better, {equal} equal, {worse} worse of {len(self.gains)} held-out prompts{note}"

    @cached_property
    def featured(self) -> list[Card]:
        """Pairs for the top of the page, evenly spaced over the file regardless of gain."""
        return [self._card(gain) for gain in evenly(self.pictured, FEATURED)]

    @cached_property
    def sections(self) -> list[Section]:
        """All pairs with images: better, worse, each with the largest change first, and the rest."""
        if self.last is None or not self.known:
            return [Section("all", "", list(map(self._card, self.pictured)))] if self.pictured else []
        found = []
        for trend, name in (("up", "better"), ("down", "worse"), ("flat", "equal")):
            chosen = sorted((g for g in self.pictured if g.trend == trend), key=lambda g: -abs(g.value or 0.0))
            order = ", largest change first" if trend != "flat" and chosen[1:] else ""
            title = f"{len(chosen)} {name} of the {len(self.pictured)} shown{order}"
            found += [Section(name, title, list(map(self._card, chosen)))] if chosen else []
        return found

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
        change = "" if self.last is None or gain.value is None else f"{gain.value:+.3f}"
        trend = gain.trend if self.last is not None else "flat"
        return Card(pictures, (), gain.prompt, gain=change, trend=trend)


def evenly(values: Sequence[T], count: int) -> list[T]:
    """Return at most `count` of the values, evenly spaced, with the first one."""
    count = min(count, len(values))
    return [values[k * len(values) // count] for k in range(count)]
