"""Condition images of a prompt (to edit, inpaint, follow), whose files are named in columns of the prompt file."""

import inspect
import struct
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

from PIL import Image, ImageOps

from gerl.errors import DataError
from gerl.protocol import Prompt, References
from gerl.utils.files import reason

# Columns passed to the pipeline as arguments of the same name: the path of an image, or a list of paths.
COLUMNS = ("image", "mask_image", "control_image")
BROKEN = (OSError, ValueError, SyntaxError, EOFError, struct.error, Image.DecompressionBombError)  # for damaged files


def with_absolute_paths(metadata: Mapping[str, object], folder: Path, where: str) -> dict[str, object]:
    """Return a prompt's `metadata` with absolute paths of condition images, given as paths in `folder` or file:// URLs.

    Raises `DataError` beginning with `where` for a file that is missing or, by its header, not an image.
    """
    row = dict(metadata)
    for name in COLUMNS:
        value = metadata.get(name)
        if isinstance(value, str):
            row[name] = absolute_picture(value, folder, f"{where} has {name}={value!r}")
        elif value is not None:
            if not isinstance(value, list) or not all(isinstance(part, str) for part in value):
                raise DataError(
                    f"{where} has {name}={value!r:.80}: expected the path of an image or a list of paths; rename "
                    "the column if it is not for the pipeline"
                )
            row[name] = [absolute_picture(part, folder, f"{where} has {part!r} in {name}") for part in value]
    return row


def absolute_picture(value: str, folder: Path, what: str) -> str:
    """Return the absolute path of an image relative to `folder`. Raises `DataError` beginning with `what`."""
    try:
        url = urlsplit(value)
        path = Path(unquote(url.path)) if url.scheme == "file" else Path(value).expanduser()
        path = (folder / path).absolute()
        there = path.is_file()
    except (OSError, RuntimeError, ValueError) as error:  # a name that is too long, ~nobody, or an incomplete address
        raise DataError(f"{what:.300}, which is not a path ({reason(error)}): correct it") from None
    if url.scheme in ("http", "https"):
        raise DataError(f"{what}: download it and give the path, so that a run does not depend on a server")
    if not there:
        raise DataError(f"{what}, but there is no file {path}: correct the path, which is relative to the prompt file")
    try:
        Image.open(path).close()
    except BROKEN as error:
        raise DataError(f"{what}, which cannot be read as an image ({reason(error)}): replace or remove it") from None
    return str(path)


def pictures_of(prompt: Prompt) -> tuple[str, ...]:
    """Return a prompt's images; others never share its micro-batch, where pipelines differ in what a list means."""
    values = [prompt.metadata.get(name) or () for name in COLUMNS]
    parts = [part for value in values for part in ([value] if isinstance(value, str) else value)]
    turn = () if prompt.turn is None or prompt.turn.image is None else (f"{prompt.id}/{prompt.turn.state}",)
    return (*turn, *(part for part in parts if isinstance(part, str)))


def files_of(prompt: Prompt) -> tuple[str, ...]:
    """Return the paths of a prompt's image files: those to train on, and the images of its columns."""
    return *(image.path for image in prompt.dataset_images), *pictures_of(prompt)


def problem_of(path: str) -> str:
    """Return why an image file cannot be used, decoding it; empty if it can."""
    try:
        open_picture(path)
    except DataError as error:
        return str(error)
    return ""


def picture_arguments(pipe: object, prompt: Prompt) -> dict[str, Image.Image | list[Image.Image]]:
    """Read the prompt's images as arguments of the pipeline, which ignores other columns. Raises `DataError`."""
    accepted = inspect.signature(type(pipe).__call__).parameters
    named = {name: prompt.metadata[name] for name in COLUMNS if name in accepted and prompt.metadata.get(name)}
    image = None if prompt.turn is None else prompt.turn.image
    try:
        arguments: dict[str, Image.Image | list[Image.Image]] = {
            name: read_picture(value) if isinstance(value, str) else References(map(read_picture, value))
            for name, value in named.items()
        }
    except DataError as error:
        raise DataError(f"prompt {prompt.id} {prompt.text!r:.80}: {error}") from None
    return arguments if image is None else arguments | {COLUMNS[0]: Image.fromarray(image)}


def read_picture(path: str | Path) -> Image.Image:
    """Read an image as RGB, upright (EXIF), without alpha, as pipelines do. Raises as `open_picture` does."""
    return open_picture(path).convert("RGB")


def open_picture(path: str | Path) -> Image.Image:
    """Open an image, upright by EXIF. Raises `DataError` if unreadable, or with more than 8 bits per channel."""
    try:
        with Image.open(path) as image:
            if image.format == "EPS":  # a program, which Pillow would let Ghostscript run
                raise DataError(f"{path} is a PostScript file: save it as PNG")
            if image.mode[0] in "IF":
                raise DataError(f"{path} has more than 8 bits per channel (mode {image.mode}): save it with 8")
            upright: Image.Image = ImageOps.exif_transpose(image)
            upright.load()
            return upright
    except FileNotFoundError:
        raise DataError(f"{path} does not exist: correct the path") from None
    except BROKEN as error:
        raise DataError(f"{path} cannot be read as an image ({reason(error)}): replace or remove it") from None
