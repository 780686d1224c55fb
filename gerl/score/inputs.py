"""Image files and their prompts: a folder, a file, or a list with columns of its own."""

import csv
import io
import re
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from gerl.errors import ConfigError, DataError
from gerl.protocol import Prompt
from gerl.utils.dataset import load_prompts

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
TABLES = (".jsonl", ".csv")


@dataclass(frozen=True)
class Item:
    """An image file, how it is called, and the prompt it was drawn for."""

    path: Path
    name: str
    prompt: Prompt


def read_items(images: str, prompts: str | None, prompt: str | None, prompt_key: str) -> list[Item]:
    """The images and their prompts, in order; the arguments are the keys of the command, and `data.prompt_key`.

    Raises:
        DataError: there are none, or something is missing or does not go together.
    """
    path = Path(images).expanduser()
    if path.is_file() and path.suffix.lower() in TABLES:
        if prompts is not None or prompt is not None:
            key = "prompts" if prompts is not None else "prompt"
            raise ConfigError(f"{key} is given, but images={images} has prompts of its own: leave it out")
        return _listed(path, prompt_key)
    if path.is_dir():
        files = [f for f in path.iterdir() if f.suffix.lower() in SUFFIXES and f.name[0] != "." and f.is_file()]
        if not files:
            raise DataError(f"images={images} has no image: put {', '.join(SUFFIXES)} files into the folder")
    elif path.is_file() and path.suffix.lower() in SUFFIXES:
        files = [path]
    else:
        what = f"is no {', '.join(SUFFIXES + TABLES)} file" if path.is_file() else "does not exist"
        raise DataError(f"images={images} {what}: give a folder of images, or a .jsonl or .csv file of them")
    files.sort(key=lambda file: (_natural(file.name), file.name))
    if prompt is not None:
        found = [Prompt(i, prompt.strip()) for i in range(len(files))]
    elif prompts is None:
        found = [Prompt(i, _sidecar(file)) for i, file in enumerate(files)]
    else:
        found = _rows(prompts, prompt_key, len(files), images)
    return [Item(file, file.name, text) for file, text in zip(files, found, strict=True)]


def _natural(name: str) -> list[str | int]:
    """A key that sorts img2 before img10: text and numbers take turns."""
    return [int(part) if i % 2 else part for i, part in enumerate(re.split(r"(\d+)", name))]


def _rows(source: str, prompt_key: str, count: int, images: str) -> list[Prompt]:
    try:
        prompts = load_prompts(source, prompt_key)
    except DataError as error:
        raise DataError(f"prompts={source}: {error}") from None
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
            f"{file} has no prompt: write it to {beside.name} beside it, or give prompts=FILE or prompt=TEXT"
        )
    text = _text(beside).strip()
    if not text:
        raise DataError(f"{beside} is empty: write the prompt of {file.name} into it")
    return text


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as UTF-8 text ({error}): save it anew") from None


def _listed(path: Path, prompt_key: str) -> list[Item]:
    """The items of a .jsonl or .csv file."""
    prompts = (
        load_prompts(str(path), prompt_key, pictures=False)
        if path.suffix.lower() == ".jsonl"
        else _csv(path, prompt_key)
    )
    items = []
    for prompt in prompts:
        image = prompt.metadata.get("image")
        if not isinstance(image, str) or not image:
            raise DataError(f"{path}, row {prompt.id + 1} has image={image!r}: give the path of the image there")
        metadata = {name: value for name, value in prompt.metadata.items() if name != "image"}
        file = path.parent / Path(image).expanduser()
        items.append(Item(file, image, Prompt(prompt.id, prompt.text, metadata)))
    return items


def _csv(path: Path, prompt_key: str) -> list[Prompt]:
    """The rows of a .csv file with a header; an empty cell is no metadata."""
    prompts = []
    try:
        for i, row in enumerate(csv.DictReader(io.StringIO(_text(path), newline=""), strict=True)):
            if None in row:
                raise DataError(f"{path}, row {i + 1} has more cells than the header: quote what has a comma in it")
            cells = {name: value for name, value in row.items() if value}
            if not (text := cells.pop(prompt_key, "").strip()):
                raise DataError(
                    f"{path}, row {i + 1} has no {prompt_key!r}: add it, or name its column in data.prompt_key"
                )
            prompts.append(Prompt(i, text, cells))
    except csv.Error as error:
        raise DataError(f"{path} is no readable .csv file ({error}): write it anew") from None
    if not prompts:
        raise DataError(f"{path} has no rows: put a header with image and {prompt_key} and at least one row in it")
    return prompts


def read_pixels(item: Item) -> np.ndarray:
    """The image [H, W, 3] uint8, turned upright; transparency is dropped, as pipelines do.

    Raises:
        DataError: it is missing, cannot be read, or has more than 8 bits a channel.
    """
    try:
        with Image.open(item.path) as image:
            if image.mode[0] in "IF":
                raise DataError(f"{item.path} has more than 8 bits a channel (mode {image.mode}): save it with 8")
            upright: Image.Image = ImageOps.exif_transpose(image)
            return np.asarray(upright.convert("RGB"))
    except (OSError, ValueError, SyntaxError, EOFError, struct.error, Image.DecompressionBombError) as error:
        missing = isinstance(error, FileNotFoundError)
        why = "does not exist" if missing else f"cannot be read as an image ({' '.join(str(error).split())})"
        raise DataError(f"{item.path} {why}: {'correct the path' if missing else 'replace or remove it'}") from None
