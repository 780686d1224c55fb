"""Evaluate a reward before training on it: `python -m gerl.score images=FOLDER out=FOLDER [key=value ...]`."""

import json
import logging
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image

from gerl.commandline.arguments import Parser, key
from gerl.commandline.command import logged_at, make_folder, run_command
from gerl.commandline.composition import compose_run, is_of_run, typed_texts
from gerl.config import ClusterConfig, Config, DataConfig, RewardConfig
from gerl.config.user_files import only_typed
from gerl.data.sources import load
from gerl.data.tables import read_rows, read_text
from gerl.errors import ConfigError, DataError
from gerl.progress import Progress
from gerl.protocol import Images, Prompt, Sample
from gerl.rewards.checks import check_named, check_reward
from gerl.rewards.scorers import SCORERS
from gerl.rewards.total import (
    TOTAL,
    check_any_scored,
    check_columns,
    distinct_columns,
    score_row,
    stop_at_failure,
    thresholds,
    with_all_active,
)
from gerl.run.attempts import attempts, is_printed
from gerl.run.validation import interval, known
from gerl.utils.condition_images import open_picture
from gerl.utils.files import csv_text, write_file
from gerl.utils.pages import Card, Line, Picture, Sheet, card_page, show, thumbnail

BINS = 24
COLUMNS = ("image", "prompt", TOTAL, "failure")  # of the tables, in addition to the scorers
HEAD = ("column", "weight", "images", "mean", "std", "min", "median", "max", "min to max")


@dataclass(frozen=True)
class ScoredImage:
    """Scored image: file, name, prompt, thumbnail, value in each column, and the reason for missing values."""

    path: Path
    name: str
    prompt: str
    thumbnail: str  # data URI
    values: Mapping[str, float | None]  # column -> score; None: not scored
    failure: str = ""

    @property
    def label(self) -> str:
        """Name in messages."""
        return str(self.path)


@dataclass(frozen=True)
class Summary:
    """Statistics of the column `name`: number of values and their distribution; NaN without values."""

    name: str
    count: int
    mean: float
    std: float  # of the population
    low: float
    median: float
    high: float
    bins: list[int]  # counts in equal parts of [low, high], empty if all values are equal


def summarise(name: str, values: Sequence[float | None]) -> Summary:
    """Summarise a column, ignoring None."""
    scored = np.array([value for value in values if value is not None], dtype=np.float64)
    if not len(scored):
        return Summary(name, 0, math.nan, math.nan, math.nan, math.nan, math.nan, [])
    low, high = float(scored.min()), float(scored.max())
    # a range below float resolution cannot be divided into equal parts
    flat = high - low <= 1e-9 * max(abs(low), abs(high))
    bins = [] if flat else [int(count) for count in np.histogram(scored, BINS, (low, high))[0]]
    return Summary(
        name, len(scored), float(scored.mean()), float(scored.std()), low, float(np.median(scored)), high, bins
    )


def write_tables(folder: Path, images: Sequence[ScoredImage]) -> None:
    """Write `scores.csv` and `scores.jsonl` to `folder`: image, prompt, the columns of the images, failure.

    A missing value is an empty cell, or null. Raises `GerlError` if a file cannot be written.
    """
    rows: list[dict[str, object]] = [
        {"image": str(i.path.absolute()), "prompt": i.prompt, **i.values, "failure": i.failure or None} for i in images
    ]
    write_file(folder / "scores.csv", csv_text(list(rows[0]) if rows else COLUMNS, rows))
    write_file(folder / "scores.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def write_gallery(
    path: Path,
    title: str,
    images: Sequence[ScoredImage],
    weights: Mapping[str, float],
    derived: Sequence[tuple[str, ...]] = (),
) -> None:
    """Write a page of the images to `path`, sorted by their first column; images without a value there are last.

    weights: of the scorers, shown beside their names, including 0. derived: of `derived_lines`. All images have the
    same columns.
    """
    labels = distinct_columns(images)
    first = next(iter(labels), "score")
    failed = sum(image.values[first] is None for image in images)
    note = (
        f"{len(images)} image{'' if len(images) == 1 else 's'}, {failed} without a {first}. Best first; click a name "
        "to sort by it, again to reverse the order."
    )
    lines = []
    for name, label in labels.items():
        s = summarise(label, [image.values[name] for image in images])
        weight = ", ".join(f"{weights[part]:g}" for part in label.split(" = ") if part in weights)
        numbers = map(show, (s.mean, s.std, s.low, s.median, s.high))
        lines.append(Line(label, [weight, str(s.count), *numbers, s.bins or ("all the same" if s.count else "")]))
    cards = []
    for image in images:
        scores = {label: image.values[name] for name, label in labels.items()}
        picture = Picture(
            image.thumbnail, image.prompt, image.prompt, note=image.name, failure=image.failure, scores=scores
        )
        cards.append(Card([picture], list(scores.values()), trend="down" if image.failure else "flat"))
    sheets = [Sheet(DERIVED, (), DERIVED_HEAD, derived)] if derived else []
    write_file(path, card_page(title, note, HEAD, lines, cards, sheets=sheets))


# --- Success rates, and the best of several images of a prompt

DERIVED = "success rates, and the best of several images of a prompt"
DERIVED_HEAD = ("column", "prompts", "mean", "95 % interval")


def derived_lines(reward: RewardConfig, images: Sequence[ScoredImage], ids: Sequence[int]) -> list[tuple[str, ...]]:
    """Return a table line for each column of `gerl.run.attempts` of the images, whose prompts are `ids`.

    Columns with equal numbers share a line. All images have the same columns.
    """
    success, lines = thresholds(reward), dict[tuple[str, ...], list[str]]()
    for column in images[0].values if images else ():
        values = [image.values[column] for image in images]
        ends = (min(scored), max(scored)) if (scored := known(values)) else None
        rates = attempts(ids, values, success.get(column))
        for name in (name for name in rates if is_printed(name, rates)):
            e = rates[name].estimate(ends)
            lines.setdefault((name, str(e.count), show(e.mean), interval(e)), []).append(f"{column}/{name}")
    return [(" = ".join(names), *cells[1:]) for cells, names in lines.items()]


# --- Image files and their prompts: a folder, a file, or a table

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
TABLES = (".jsonl", ".csv")


@dataclass(frozen=True)
class Item:
    """Image file with its name and prompt."""

    path: Path
    name: str
    prompt: Prompt


def read_items(images: str, prompts: str | None, prompt: str | None, data: DataConfig) -> list[Item]:
    """Read the images and their prompts, in order; the arguments are the command's keys, and the block `data`.

    Raises `DataError`: there are none, or something is missing or inconsistent.
    """
    path = Path(images).expanduser()
    if path.is_file() and path.suffix.lower() in TABLES:
        if prompts is not None or prompt is not None:
            key = "prompts" if prompts is not None else "prompt"
            raise ConfigError(f"{key} is given, but images={images} has its own prompts: remove it")
        return _from_table(path, data.prompt_key)
    if path.is_dir():
        files = [f for f in path.iterdir() if f.suffix.lower() in SUFFIXES and f.name[0] != "." and f.is_file()]
        if not files:
            raise DataError(f"images={images} has no image: put {', '.join(SUFFIXES)} files into the folder")
    elif path.is_file() and path.suffix.lower() in SUFFIXES:
        files = [path]
    else:
        what = f"is not a {', '.join(SUFFIXES + TABLES)} file" if path.is_file() else "does not exist"
        raise DataError(f"images={images} {what}: expected a folder of images, or a .jsonl or .csv file of them")
    files.sort(key=lambda file: (_natural(file.name), file.name))
    if prompt is not None:
        texts = [Prompt(i, prompt.strip()) for i in range(len(files))]
    elif prompts is None:
        texts = [Prompt(i, _sidecar(file)) for i, file in enumerate(files)]
    else:
        texts = load(prompts, data, "prompts")
        if len(texts) != len(files):
            raise DataError(
                f"prompts={prompts} has {len(texts)} prompts for the {len(files)} images of images={images}: give one "
                "per image, in the order of their names, or prompt=TEXT for all"
            )
    return [Item(file, file.name, text) for file, text in zip(files, texts, strict=True)]


def _natural(name: str) -> list[str | int]:
    """Return a sort key that puts img2 before img10: alternating text and numbers."""
    return [int(part) if i % 2 else part for i, part in enumerate(re.split(r"(\d+)", name))]


def _sidecar(file: Path) -> str:
    beside = file.with_suffix(".txt")
    if not beside.is_file():
        raise DataError(
            f"{file} has no prompt: write it to {beside.name} next to it, or give prompts=FILE or prompt=TEXT"
        )
    text = read_text(beside).strip()
    if not text:
        raise DataError(f"{beside} is empty: write the prompt of {file.name} into it")
    return text


def _from_table(path: Path, prompt_key: str) -> list[Item]:
    items = []
    for where, prompt in read_rows(path, prompt_key):
        image = prompt.metadata.get("image")
        if not isinstance(image, str) or not image:
            raise DataError(f"{where} has image={image!r}: expected the path of the image")
        metadata = {name: value for name, value in prompt.metadata.items() if name != "image"}
        items.append(Item(path.parent / Path(image).expanduser(), image, replace(prompt, metadata=metadata)))
    return items


def load_rgb(item: Item) -> Image.Image:
    """Load an image in RGB, composited onto white if transparent. Errors as in `open_picture`."""
    image = open_picture(item.path)
    if not image.has_transparency_data:
        return image.convert("RGB")
    ground = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(ground, image.convert("RGBA")).convert("RGB")


def groups_of(items: Sequence[Item]) -> list[list[int]]:
    """Return the indices of each group: images whose prompts are equal in text and columns, as in training."""
    groups: dict[str, list[int]] = {}
    for i, item in enumerate(items):
        row = [item.prompt.text, item.prompt.metadata]
        groups.setdefault(json.dumps(row, sort_keys=True, default=str), []).append(i)
    return list(groups.values())


def describe_groups(items: Sequence[Item], groups: Sequence[Sequence[int]], scorers: Collection[str]) -> None:
    """Log which images the groupwise `scorers` compare; warn if they compare none."""
    by_text: dict[str, list[dict[str, object]]] = {}
    for item in items:
        by_text.setdefault(item.prompt.text, []).append(item.prompt.metadata)
    names = {name: None for rows in by_text.values() for row in rows for name in row}
    differ = [n for n in names if any(row.get(n) != rows[0].get(n) for rows in by_text.values() for row in rows)]
    sizes, what, compared = sorted(map(len, groups)), ", ".join(differ), " and ".join(sorted(scorers))
    if differ and sizes[-1] == 1:
        logger.warning(
            "%s compares the images of a prompt, but no two have the same %s: each is its own group; remove a "
            "column that does not belong to the prompt",
            *(compared, what),
        )
        return
    logger.info(
        "%s compares images with the same prompt%s: %d groups of %s images",
        *(compared, f" and the same {what}" if differ else "", len(groups)),
        f"{sizes[0]} to {sizes[-1]}" if sizes[0] < sizes[-1] else sizes[0],
    )


logger = logging.getLogger("gerl")
WIDTH = 256  # pixels, to which wider images are downscaled in the gallery


@dataclass(frozen=True, kw_only=True)
class Request:
    """Command-line options."""

    images: str = key(
        "a folder of images (png, jpg, webp), one such file, or a .jsonl or .csv file with the columns image and "
        "prompt; its other columns are metadata, its paths are relative to the file",
        required=True,
    )
    prompts: str | None = key(
        "for a folder: .txt, .jsonl, .csv or .parquet, row i for the i-th image by name (img2 precedes img10)"
    )
    prompt: str | None = key(
        "one prompt for all images of a folder; without prompts and prompt: NAME.txt next to each image"
    )
    trust: bool = key(
        "true: run the code that the run's settings name (algorithm, scorers, prompts, pipeline); false: refuse it, "
        "with the files and their SHA-256",
        False,
    )
    out: Path = key("folder for scores.csv, scores.jsonl and gallery.html", required=True)
    batch: int | None = key(
        "images per scorer call; default: rollout.micro_batch_size, as in training",
        unit="a number of images, at least 1",
        low=1,
    )


PARSER = Parser(
    "scoring",
    "python -m gerl.score",
    "[images=]FOLDER|FILE [prompts=FILE|prompt=TEXT] out=FOLDER [key=value ...]",
    "Score images with a reward, before training on it.",
    Request,
    passed=("experiment", "data.prompt_key", "data.columns", "data.template", "logger.progress", "logger.level"),
    blocks=("reward",),
    bare="images",
    notes="The reward is configured as in training. Without experiment=NAME|FILE.yaml (also the config.yaml of a "
    f"run), only the scorers named here are used. gerl has {', '.join(SCORERS)}.",
)


def main(argv: Sequence[str] | None = None, program: str = PARSER.program) -> int:
    """Run the command line; returns the exit code, see `run_command`: 0 if at least one image has a score."""
    return run_command(argv, lambda: PARSER.help(program), _work)


def _work(arguments: list[str]) -> None:
    request, overrides = PARSER.parse(arguments)
    experiment = next((o.partition("=")[2] for o in overrides if o.startswith("experiment=")), "plain")
    with only_typed(None if request.trust or not is_of_run(experiment) else typed_texts(overrides)):
        run(*parse(arguments))


def run(request: Request, config: Config) -> list[ScoredImage]:
    """Check inputs, score, and write the results; return the images in their order.

    Raises `GerlError`: images, prompts or scorers are invalid, or no image has a total; what was scored is written.
    """
    reward = with_all_active(config.reward)
    if reward.by_latents("validation") is not None:
        raise ConfigError(
            "reward.scorers.base_alignment needs the latents of sampled images, which image files do not have: remove "
            "it with '~reward.scorers.base_alignment', or compare LoRAs with python -m gerl.evaluate"
        )
    items = read_items(request.images, request.prompts, request.prompt, config.data)
    check_named(reward)
    try:
        check_reward(reward, [item.prompt for item in items])
    except DataError as error:
        raise DataError(f"images={request.images}: {error}") from None
    # an unreadable image is reported before scoring
    if transparent := sum(open_picture(item.path).has_transparency_data for item in items):
        logger.info("%d of %d images are partly transparent, and are composited onto white", transparent, len(items))
    make_folder(request.out)
    logger.info("%d images; scorers: %s", len(items), ", ".join(reward.scorers))
    images: dict[int, ScoredImage] = {}
    try:
        shown = Progress(len(items), disable=not config.logger.progress, unit="image")
        with logged_at(config.logger.level), shown as progress:
            for batch, scored in score(reward, items, request.batch or config.rollout.micro_batch_size):
                images |= zip(batch, scored, strict=True)
                progress.update(len(batch))
                if reward.on_error == "stop":
                    stop_at_failure(scored)
    finally:
        if images:
            ids = {i: number for number, members in enumerate(groups_of(items)) for i in members}
            write(request, reward, [images[i] for i in sorted(images)], [ids[i] for i in sorted(images)])
    images_scored = [images[i] for i in range(len(items))]
    check_any_scored(images_scored)
    return images_scored


def parse(arguments: Sequence[str]) -> tuple[Request, Config]:
    """Parse the command line into a request and the configuration; raises `ConfigError` for contradictory keys.

    Without `experiment` only the named scorers are used, or `ocr` if there are none.
    """
    request, overrides = PARSER.parse(arguments)
    if request.prompts and request.prompt:
        raise ConfigError("prompts and prompt are both given: keep the file or the one prompt for all")
    if not any(override.startswith("experiment=") for override in overrides):
        overrides.insert(0, "experiment=plain")
    config = compose_run(overrides).config
    check_columns(config.reward, COLUMNS)
    return request, config


def score(
    reward: RewardConfig, items: Sequence[Item], batch_size: int
) -> Iterator[tuple[list[int], list[ScoredImage]]]:
    """Score batches of images; yields the indices of a batch and the images with their scores.

    Images with equal prompts form a group, see `groups_of`: if a scorer is groupwise, a group is in one batch, which
    may then be larger.
    """
    # not at the top: these import torch, which takes seconds, and keys and files are checked first
    from gerl.cluster import Cluster, Pending
    from gerl.rewards.manager import RewardManager

    # a separate environment requires a separate process
    launcher: Literal["ray", "local"] = "ray" if any(scorer.env for scorer in reward.scorers.values()) else "local"
    with Cluster(ClusterConfig(launcher=launcher, num_workers=1)) as here:
        manager = RewardManager(reward, here)
        groups = groups_of(items)
        if manager.groupwise:
            describe_groups(items, groups, manager.groupwise)
        ids = {i: number for number, members in enumerate(groups) for i in members}
        together = groups if manager.groupwise else [[i] for i in range(len(items))]
        for batch in _batches(together, batch_size):
            chosen = [items[i] for i in batch]
            prompts = [replace(items[i].prompt, id=ids[i]) for i in batch]
            images = Images(0, [np.asarray(load_rgb(item)) for item in chosen], 0.0)
            samples = [Sample(prompt, i, 0, 0) for i, prompt in zip(batch, prompts, strict=True)]
            scoring = manager.open([samples])
            scoring.add(0, Pending("image reader", value=images))
            (scores,) = scoring.finish()
            shown = [thumbnail(pixels, WIDTH) for pixels in images.pixels]
            places = [(item.path, item.name, item.prompt.text) for item in chosen]
            yield batch, [ScoredImage(*places[i], shown[i], *score_row(scores, i)) for i in range(len(chosen))]


def _batches(together: Iterable[list[int]], size: int) -> Iterator[list[int]]:
    """Yield batches of whole members of `together`: at least one, and otherwise at most `size` indices."""
    batch: list[int] = []
    for members in together:
        if batch and len(batch) + len(members) > size:
            yield batch
            batch = []
        batch = batch + members
    if batch:
        yield batch


def write(request: Request, reward: RewardConfig, images: Sequence[ScoredImage], ids: Sequence[int]) -> None:
    """Write `scores.csv`, `scores.jsonl` and `gallery.html` and log the summary; raises `GerlError` on failure.

    `ids`: the prompt of each image.
    """
    out = request.out
    names = list(dict.fromkeys(name for image in images for name in image.values))
    # a scorer that failed in the first batch adds its further columns late: keep them beside it
    columns = dict.fromkeys(c for name in reward.scorers for c in names if c == name or c.startswith(f"{name}/"))
    images = [replace(image, values={name: image.values.get(name) for name in (TOTAL, *columns)}) for image in images]
    write_tables(out, images)
    weights = {name: scorer.weight for name, scorer in reward.scorers.items()}
    derived = derived_lines(reward, images, ids)
    write_gallery(out / "gallery.html", Path(request.images).expanduser().resolve().name, images, weights, derived)
    logger.info("%s", closing_screen(out, images, derived))


def closing_screen(out: Path, images: Sequence[ScoredImage], derived: Sequence[tuple[str, ...]] = ()) -> str:
    """Return mean, std, minimum and maximum of each column, the failures, and the paths of the files.

    `derived`: of `derived_lines`.
    """
    labels = distinct_columns(images)
    width = max(map(len, labels.values()))
    lines = ["", f"{'':<{width}} {'images':>7} {'mean':>10} {'std':>10} {'min':>10} {'max':>10}"]
    for name, label in labels.items():
        s = summarise(label, [image.values[name] for image in images])
        numbers = " ".join(f"{number:>10.4g}" for number in (s.mean, s.std, s.low, s.high))
        lines.append(f"{label:<{width}} {s.count:>7} {numbers}")
    if derived:
        wide = max(len(name) for name, *_ in derived)
        lines += ["", f"{'':<{wide}} {'prompts':>7} {'mean':>10}   95 % interval"]
        lines += [f"{name:<{wide}} {count:>7} {mean:>10}   {likely}" for name, count, mean, likely in derived]
    if failed := [image for image in images if image.failure]:
        first = f"the first, {failed[0].name}: {failed[0].failure}"
        lines.append(f"failures: {len(failed)} of {len(images)} images; {first}")
    lines += ["", *(f"{out / name}" for name in ("scores.csv", "scores.jsonl", "gallery.html"))]
    return "\n".join(lines)
