"""Image files and their prompts: a folder, a file, or a list with columns of its own."""

import json
import logging
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from PIL import Image

from gerl.config import DataConfig
from gerl.data.sources import load
from gerl.data.tables import read_rows, read_text
from gerl.errors import ConfigError, DataError
from gerl.protocol import Prompt
from gerl.utils.condition_images import open_picture

logger = logging.getLogger("gerl")
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
TABLES = (".jsonl", ".csv")


@dataclass(frozen=True)
class Item:
    """An image file, how it is called, and the prompt it was drawn for."""

    path: Path
    name: str
    prompt: Prompt


def read_items(images: str, prompts: str | None, prompt: str | None, data: DataConfig) -> list[Item]:
    """The images and their prompts, in order; the arguments are the keys of the command, and the block `data`.

    Raises:
        DataError: there are none, or something is missing or does not go together.
    """
    path = Path(images).expanduser()
    if path.is_file() and path.suffix.lower() in TABLES:
        if prompts is not None or prompt is not None:
            key = "prompts" if prompts is not None else "prompt"
            raise ConfigError(f"{key} is given, but images={images} has its own prompts: remove it")
        return _listed(path, data.prompt_key)
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
        found = [Prompt(i, prompt.strip()) for i in range(len(files))]
    elif prompts is None:
        found = [Prompt(i, _sidecar(file)) for i, file in enumerate(files)]
    else:
        found = _rows(prompts, data, len(files), images)
    return [Item(file, file.name, text) for file, text in zip(files, found, strict=True)]


def _natural(name: str) -> list[str | int]:
    """A key that sorts img2 before img10: text and numbers take turns."""
    return [int(part) if i % 2 else part for i, part in enumerate(re.split(r"(\d+)", name))]


def _rows(source: str, data: DataConfig, count: int, images: str) -> list[Prompt]:
    prompts = load(source, data, "prompts")
    if len(prompts) != count:
        raise DataError(
            f"prompts={source} has {len(prompts)} prompts for the {count} images of images={images}: give one per "
            "image, in the order of their names, or prompt=TEXT for all"
        )
    return prompts


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


def _listed(path: Path, prompt_key: str) -> list[Item]:
    """The items of a .jsonl or .csv file."""
    items = []
    for where, prompt in read_rows(path, prompt_key):
        image = prompt.metadata.get("image")
        if not isinstance(image, str) or not image:
            raise DataError(f"{where} has image={image!r}: expected the path of the image")
        metadata = {name: value for name, value in prompt.metadata.items() if name != "image"}
        items.append(Item(path.parent / Path(image).expanduser(), image, replace(prompt, metadata=metadata)))
    return items


def picture_of(item: Item) -> Image.Image:
    """The image in RGB as a viewer shows it: what is transparent is white. Errors as in `open_picture`."""
    image = open_picture(item.path)
    if not image.has_transparency_data:
        return image.convert("RGB")
    ground = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(ground, image.convert("RGBA")).convert("RGB")


def groups_of(items: Sequence[Item]) -> list[list[int]]:
    """The indices of each group: images whose prompts are equal in text and columns, as those of a training row are."""
    found: dict[str, list[int]] = {}
    for i, item in enumerate(items):
        row = [item.prompt.text, item.prompt.metadata]
        found.setdefault(json.dumps(row, sort_keys=True, default=str), []).append(i)
    return list(found.values())


def describe_groups(items: Sequence[Item], groups: Sequence[Sequence[int]], scorers: Collection[str]) -> None:
    """Say in the log which images `scorers`, which are groupwise, compare; warn where it is none."""
    by_text: dict[str, list[dict[str, object]]] = {}
    for item in items:
        by_text.setdefault(item.prompt.text, []).append(item.prompt.metadata)
    names = {name: None for rows in by_text.values() for row in rows for name in row}
    differ = [n for n in names if any(row.get(n) != rows[0].get(n) for rows in by_text.values() for row in rows)]
    sizes, what = sorted(map(len, groups)), ", ".join(differ)
    if differ and sizes[-1] == 1:
        logger.warning(
            "%s compares the images of a prompt, but no two have the same %s: each is its own group; remove a "
            "column that does not belong to the prompt",
            *(" and ".join(sorted(scorers)), what),
        )
        return
    logger.info(
        "%s compares images with the same prompt%s: %d groups of %s images",
        *(" and ".join(sorted(scorers)), f" and the same {what}" if differ else "", len(groups)),
        f"{sizes[0]} to {sizes[-1]}" if sizes[0] < sizes[-1] else sizes[0],
    )
