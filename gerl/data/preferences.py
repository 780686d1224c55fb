"""Rows of a prompt file with images to train on, and preferences between them.

The columns determine the kind of a row:
    images, ranks: paths, and the rank of each from 1 for the best, as written by `gerl vote` (whose column sources
        becomes image, the condition image of the prompt)
    chosen, rejected: the better and the worse of two images
    image_0, image_1, label_0: 1 if the first is better, 0 if the second is, 0.5 for a tie, as in Pick-a-Pic
    image, label: true if the image is liked, else false
    image: an image to imitate
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gerl.errors import DataError
from gerl.protocol import DatasetImage, Prompt
from gerl.utils.condition_images import absolute_picture, pictures_of

logger = logging.getLogger(__name__)
KINDS = (("images", "ranks"), ("chosen", "rejected"), ("image_0", "image_1", "label_0"), ("image", "label"), ("image",))
SPELLED = ", or ".join(" and ".join(", ".join(kind).rsplit(", ", 1)) for kind in KINDS)
LABELS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}


def with_images(prompt: Prompt, folder: Path, where: str) -> Prompt:
    """Return the prompt with the images of its row, removed from the metadata; paths are relative to `folder`.

    Raises `DataError`, beginning with `where`, for a row of none of the kinds above, or a missing image.
    """
    row = prompt.metadata
    kind = next((kind for kind in KINDS if all(row.get(name) is not None for name in kind)), None)
    if kind is None:
        there = f"the columns {', '.join(row)}" if row else "no column"
        raise DataError(
            f"{where} has {there} in addition to its prompt: with data.train_on=files a row needs {SPELLED}; see "
            "docs/preferences.md"
        )
    match kind[0]:
        case "images":
            paths, scores = _parse_ranks(row["images"], row["ranks"], where)
        case "chosen":
            paths, scores = [row["chosen"], row["rejected"]], [1.0, 0.0]
        case "image_0":
            first = _parse_number(row["label_0"], f"{where} has label_0", 0.0, 1.0)
            paths, scores = [row["image_0"], row["image_1"]], [first, 1 - first]
        case _:
            liked = LABELS.get(str(row["label"]).strip().lower()) if "label" in kind else True
            if liked is None:
                raise DataError(
                    f"{where} has label={row['label']!r:.80}: it must be true if the image is liked, or false"
                )
            paths, scores = [row["image"]], [1.0 if liked else -1.0]
    names = list(kind) if kind[0] != "images" else ["images"] * len(paths)
    images = []
    for name, path, score in zip(names, paths, scores, strict=False):
        if not isinstance(path, str):
            raise DataError(f"{where} has {name}={path!r:.80}: expected the path of an image")
        images.append(DatasetImage(absolute_picture(path, folder, f"{where} has {name}={path!r}"), score))
    metadata = {name: value for name, value in row.items() if name not in (*kind, "sources")}
    if (sources := row.get("sources")) and kind[0] == "images":  # from votes on edits
        metadata.setdefault("image", sources[0] if isinstance(sources, list) and len(sources) == 1 else sources)
    return replace(prompt, metadata=metadata, dataset_images=tuple(images))


def merge_duplicates(rows: Sequence[Prompt]) -> list[Prompt]:
    """Return the rows with a preference; rows with the same images are merged, with mean scores.

    A row has a preference if its scores differ or its single image is liked or disliked. Raises `DataError` if there
    are none.
    """
    alike: dict[tuple[str, ...], list[Prompt]] = {}
    for row in rows:
        key = (row.text, *pictures_of(row), "", *(image.path for image in row.dataset_images))
        alike.setdefault(key, []).append(row)
    groups, prompts = list(alike.values()), list[Prompt]()
    for same in groups:
        scores = zip(*([image.score for image in row.dataset_images] for row in same), strict=True)
        means = [math.fsum(values) / len(same) for values in scores]
        images = tuple(replace(i, score=mean) for i, mean in zip(same[0].dataset_images, means, strict=True))
        if len(set(means)) > 1 or (len(means) == 1 and means[0] != 0):
            prompts.append(replace(same[0], dataset_images=images))
    if not prompts:
        raise DataError(
            f"none of its {len(rows)} rows prefers an image to another: all ranks of a row are equal, or its label "
            "is a tie"
        )
    if len(prompts) < len(groups):
        logger.info("%d of %d rows prefer no image to another and are skipped", len(groups) - len(prompts), len(groups))
    return prompts


def images_to_imitate(rows: Sequence[Prompt]) -> list[Prompt]:
    """Return a prompt for each image to imitate: the best of each row, and a single image unless it is disliked.

    Their ids are negative, unlike those of sampled prompts. Raises `DataError` if there are none.
    """
    prompts: list[Prompt] = []
    for row in rows:
        best = max(image.score for image in row.dataset_images)
        good = [
            image for image in row.dataset_images if image.score == best and (len(row.dataset_images) > 1 or best > 0)
        ]
        prompts += [replace(row, id=-1 - len(prompts) - i, dataset_images=(image,)) for i, image in enumerate(good)]
    if not prompts:
        raise DataError("all of its images are disliked: add some that are to be imitated")
    return prompts


def check_groups(prompts: Sequence[Prompt], most: int, alone: bool, algorithm: str) -> None:
    """Raise `DataError` if a prompt has more than `most` images, or one image although `alone` is false."""
    largest = max(prompts, key=lambda prompt: len(prompt.dataset_images))
    if len(largest.dataset_images) > most:
        raise DataError(
            f"prompt {largest.id} {largest.text!r:.80} has {len(largest.dataset_images)} images, and a row may have at "
            f"most rollout.n={most}: set rollout.n={len(largest.dataset_images)}"
        )
    single = next((prompt for prompt in prompts if len(prompt.dataset_images) == 1), None)
    if single is not None and not alone:
        raise DataError(
            f"prompt {single.id} {single.text!r:.80} has one image, and {algorithm} compares the images of a row: give "
            "two or more with ranks, chosen and rejected, or use algorithm=kto or algorithm=sft"
        )


def _parse_ranks(images: object, ranks: object, where: str) -> tuple[list[object], list[float]]:
    if not isinstance(images, list) or not isinstance(ranks, list) or len(images) != len(ranks) or len(images) < 2:
        raise DataError(
            f"{where} has images={images!r:.80} and ranks={ranks!r:.80}: expected two or more paths, and a rank "
            "for each"
        )
    return images, [-_parse_number(rank, f"{where} has a rank", 1.0, math.inf) for rank in ranks]


def _parse_number(value: object, what: str, low: float, high: float) -> float:
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not (low <= number <= high) or math.isinf(number) or isinstance(value, bool):
        limits = f"from {low:g} to {high:g}" if high < math.inf else f"of at least {low:g}"
        raise DataError(f"{what}={value!r:.80}: it must be a number {limits}")
    return number
