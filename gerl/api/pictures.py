"""Pictures as programs have them, to be scored: files, PIL images, arrays and tensors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from gerl.errors import DataError
from gerl.utils.files import write_file

Rows = str | Path | Sequence[str | Mapping[str, Any]] | None
CHANNELS = (1, 3, 4)
FORMS = (
    "expected the path of a file, a PIL image, or an array or tensor [H, W, 3] or [3, H, W] of bytes or of floats "
    "from 0 to 1"
)


def listed(images: Any, prompts: Rows, here: Path) -> Path:
    """A file in the folder `here` of images and prompts, as `gerl.score` reads it; pictures in memory lie beside it.

    images: several, or one, or what a pipeline returned. Raises `DataError` for what is no picture, and for prompts
    that do not go with them.
    """
    images = getattr(images, "images", images)
    if isinstance(images, Image.Image) or (hasattr(images, "shape") and len(images.shape) in (2, 3)):
        images = [images]
    if not isinstance(images, Iterable):
        raise DataError(f"images are {type(images).__name__}: {FORMS}, or a list of these")
    pictures = list(images)
    if prompts is None:
        raise DataError("prompts are missing: give one per image, or one for all")
    rows = [prompts] * len(pictures) if isinstance(prompts, str | Path | Mapping) else list(prompts)
    if len(rows) != len(pictures):
        raise DataError(f"{len(rows)} prompts for {len(pictures)} images: give one per image, or one for all")
    lines = []
    for i, (image, row) in enumerate(zip(pictures, rows, strict=True)):
        if not isinstance(row, str | Path | Mapping):
            raise DataError(
                f"prompt {i} is {type(row).__name__}: expected a string, or a dictionary with the key prompt"
            )
        columns = dict(row) if isinstance(row, Mapping) else {"prompt": str(row)}
        try:
            lines.append(json.dumps({**columns, "image": str(_file(image, i, here))}, ensure_ascii=False) + "\n")
        except (TypeError, ValueError) as error:
            raise DataError(
                f"columns of prompt {i} must be strings and numbers ({error}): give images as file paths"
            ) from None
    write_file(here / "images.jsonl", "".join(lines))
    return here / "images.jsonl"


def _file(image: object, i: int, here: Path) -> Path:
    """The file of image `i`, which is written into the folder `here` if it has none."""
    if isinstance(image, str | Path):
        return Path(image).expanduser().absolute()
    if not isinstance(image, Image.Image):
        image = _of_numbers(image, i)
    if image.mode[0] in "IF":
        raise DataError(f"image {i} has more than 8 bits per channel (mode {image.mode}): convert it to 8")
    path = here / f"{i}.png"
    image.convert("RGBA" if image.has_transparency_data else "RGB").save(path)
    return path


def _of_numbers(image: Any, i: int) -> Image.Image:
    """The picture that an array or tensor is; raises `DataError` if it is none."""
    try:  # a tensor of a GPU, of half precision, or with a gradient
        values = np.asarray(image.detach().cpu().float() if hasattr(image, "detach") else image)
        whole = not (image.is_floating_point() if hasattr(image, "detach") else values.dtype.kind == "f")
    except (TypeError, ValueError, RuntimeError):
        values = np.empty(0, object)
    if values.dtype.kind not in "uif":
        raise DataError(f"image {i} is {type(image).__name__}: {FORMS}")
    if values.ndim == 3 and values.shape[0] in CHANNELS and values.shape[2] not in CHANNELS:
        values = values.transpose(1, 2, 0)
    if not (values.ndim == 2 or (values.ndim == 3 and values.shape[2] in CHANNELS)) or 0 in values.shape:
        raise DataError(f"image {i} has the shape {list(values.shape)}: {FORMS}")
    low, high = float(values.min()), float(values.max())
    if not 0 <= low <= high <= (255 if whole else 1):  # nor is NaN
        raise DataError(f"image {i} has values from {low:g} to {high:g}: {FORMS}")
    pixels = (values if whole else (values * 255).round()).astype(np.uint8)
    return Image.fromarray(pixels[:, :, 0] if pixels.ndim == 3 and pixels.shape[2] == 1 else pixels)
