"""Look at a reward before training on it: `python -m gerl.score images=FOLDER out=FOLDER [key=value ...]`."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from gerl.commandline.arguments import Parser, key
from gerl.commandline.command import make_folder, run_command
from gerl.commandline.composition import compose_run
from gerl.config import ClusterConfig, Config, RewardConfig
from gerl.errors import ConfigError, DataError
from gerl.pages.images import thumbnail
from gerl.protocol import Images, Sample
from gerl.rewards.checks import check_reward
from gerl.rewards.scorers import SCORERS
from gerl.rewards.total import (
    TOTAL,
    check_any_scored,
    check_columns,
    distinct_columns,
    looking_always,
    row_of,
    stop_at_failure,
)
from gerl.run.progress import Progress
from gerl.score.gallery import COLUMNS, ScoredImage, summarise, write_gallery, write_tables
from gerl.score.inputs import Item, describe_groups, groups_of, picture_of, read_items
from gerl.utils.condition_images import open_picture

logger = logging.getLogger("gerl")
WIDTH = 256  # pixels, to which wider images are reduced in the gallery


@dataclass(frozen=True, kw_only=True)
class Request:
    """The keys of the command line."""

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
    passed=("experiment", "data.prompt_key", "data.columns", "logger.progress"),
    blocks=("reward",),
    bare="images",
    notes="The reward is configured as in training. Without experiment=NAME|FILE.yaml (also the config.yaml of a "
    f"run), only the scorers named here are used, or ocr if there are none. gerl has {', '.join(SCORERS)}.",
)


def main(argv: Sequence[str] | None = None, program: str = PARSER.program) -> int:
    """Run the command line; returns the exit code, see `run_command`.

    Images without a score are no error as long as there is one with a score.
    """
    return run_command(argv, lambda: PARSER.help(program), lambda arguments: run(*parse(arguments)))


def run(request: Request, config: Config) -> list[ScoredImage]:
    """Check everything that can be checked, score, write; returns the images in their order.

    Raises:
        GerlError: something is wrong with images, prompts or scorers, or no image has a total; what was scored is
            written.
    """
    reward = looking_always(config.reward)
    items = read_items(request.images, request.prompts, request.prompt, config.data)
    try:
        check_reward(reward, [item.prompt for item in items])
    except DataError as error:
        raise DataError(f"images={request.images}: {error}") from None
    # one that cannot be read is known before the work
    if transparent := sum(open_picture(item.path).has_transparency_data for item in items):
        logger.info("%d of %d images are partly transparent, and are composited onto white", transparent, len(items))
    make_folder(request.out)
    logger.info("%d images; scorers: %s", len(items), ", ".join(reward.scorers))
    images: dict[int, ScoredImage] = {}
    try:
        with Progress(len(items), disable=not config.logger.progress, unit="image") as progress:
            for batch, scored in score(reward, items, request.batch or config.rollout.micro_batch_size):
                images |= zip(batch, scored, strict=True)
                progress.update(len(batch))
                if reward.on_error == "stop":
                    stop_at_failure(scored)
    finally:
        if images:
            write(request, reward, [images[i] for i in sorted(images)])
    found = [images[i] for i in range(len(items))]
    check_any_scored(found)
    return found


def parse(arguments: Sequence[str]) -> tuple[Request, Config]:
    """The command line as a request and the configuration; raises `ConfigError` for what cannot be.

    Without `experiment` only the scorers that are named take part, or `ocr` if there are none.
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

    Images with equal prompts are a group, see `groups_of`: where a scorer compares them, they are in one batch, which
    may then be larger.
    """
    # Here and not above: these import torch, which takes seconds, and the keys and files come first.
    from gerl.cluster import Cluster, Pending
    from gerl.rewards.manager import RewardManager

    # An environment of its own takes a process of its own.
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
            images = Images(0, [np.asarray(picture_of(item)) for item in chosen], 0.0)
            samples = [Sample(prompt, i, 0, 0) for i, prompt in zip(batch, prompts, strict=True)]
            scoring = manager.open([samples])
            scoring.add(0, Pending("image reader", value=images))
            (scores,) = scoring.finish()
            shown = [thumbnail(pixels, WIDTH) for pixels in images.pixels]
            places = [(item.path, item.name, item.prompt.text) for item in chosen]
            yield batch, [ScoredImage(*places[i], shown[i], *row_of(scores, i)) for i in range(len(chosen))]


def _batches(together: Iterable[list[int]], size: int) -> Iterator[list[int]]:
    """Batches of at least one of `together` and, beyond that, at most `size` indices."""
    batch: list[int] = []
    for members in together:
        if batch and len(batch) + len(members) > size:
            yield batch
            batch = []
        batch = batch + members
    if batch:
        yield batch


def write(request: Request, reward: RewardConfig, images: Sequence[ScoredImage]) -> None:
    """Write `scores.csv`, `scores.jsonl` and `gallery.html` and report the summary; raises `GerlError` if it cannot."""
    out = request.out
    known = list(dict.fromkeys(name for image in images for name in image.values))
    # A scorer that failed in the first batch shows its further columns late: they belong beside it all the same.
    columns = dict.fromkeys(c for name in reward.scorers for c in known if c == name or c.startswith(f"{name}/"))
    images = [replace(image, values={name: image.values.get(name) for name in (TOTAL, *columns)}) for image in images]
    write_tables(out, images)
    weights = {name: scorer.weight for name, scorer in reward.scorers.items()}
    write_gallery(out / "gallery.html", Path(request.images).expanduser().resolve().name, images, weights)
    logger.info("%s", closing_screen(out, images))


def closing_screen(out: Path, images: Sequence[ScoredImage]) -> str:
    """Mean, std, least and greatest score of each column, the failures, and where things lie."""
    labels = distinct_columns(images)
    width = max(map(len, labels.values()))
    lines = ["", f"{'':<{width}} {'images':>7} {'mean':>10} {'std':>10} {'min':>10} {'max':>10}"]
    for name, label in labels.items():
        s = summarise(label, [image.values[name] for image in images])
        numbers = " ".join(f"{number:>10.4g}" for number in (s.mean, s.std, s.low, s.high))
        lines.append(f"{label:<{width}} {s.count:>7} {numbers}")
    failed = [image for image in images if image.failure]
    if failed:
        first = f"the first, {failed[0].name}: {failed[0].failure}"
        lines.append(f"failures: {len(failed)} of {len(images)} images; {first}")
    lines += ["", *(f"{out / name}" for name in ("scores.csv", "scores.jsonl", "gallery.html"))]
    return "\n".join(lines)
