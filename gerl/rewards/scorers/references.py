"""Pictures that a prompt's row names and a scorer looks at: a reference, the source of an edit."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from PIL import Image

from gerl.errors import DataError
from gerl.rewards.scorers.base import Metadata
from gerl.utils.condition_images import read_picture

if TYPE_CHECKING:
    import torch

Reference: TypeAlias = Path | Image.Image


def reference_of(scorer: str, prompt: str, metadata: Metadata, column: str) -> Reference:
    """The one picture in the row's `column`: the path of a file, or a PIL image.

    Raises `DataError`, which names the prompt and the `scorer`, if there is none, or several.
    """
    found = references_of(scorer, prompt, metadata, column)
    if len(found) > 1:
        raise DataError(
            f"{prompt!r} has {len(found)} images in {column!r}, but {scorer} compares with one: use a column with "
            "a single image for the scorer"
        )
    return found[0]


def references_of(scorer: str, prompt: str, metadata: Metadata, column: str) -> list[Reference]:
    """The pictures in the row's `column`, which has one or a list of them; raises `DataError` if there is none."""
    given = metadata.get(column)
    parts: list[Any] = list(given) if isinstance(given, list | tuple) else [given]
    if not parts or not all(isinstance(part, Image.Image | Path) or (isinstance(part, str) and part) for part in parts):
        raise DataError(
            f"{prompt!r} has no reference for the {scorer} scorer, expected the path of an image in the row's "
            f"{column!r}, got {given!r:.200}: add it, or use another column for the scorer"
        )
    return [part if isinstance(part, Image.Image) else _file(prompt, part) for part in parts]


def _file(prompt: str, given: str | Path) -> Path:
    file = Path(given).expanduser()
    if not file.is_file():
        raise DataError(
            f"{prompt!r} has the reference {str(given)!r}, but there is no file {file.absolute()}: correct the path"
        )
    return file


def read(reference: Reference) -> Image.Image:
    """The picture of a reference in RGB, turned upright; raises `DataError` for a file that is no image."""
    return reference if isinstance(reference, Image.Image) else read_picture(reference)


def features_of(
    references: Sequence[Reference], features: Callable[[list[Image.Image]], "torch.Tensor"]
) -> "torch.Tensor":
    """`features` [B, dim] of references [B]; each is read and encoded once, as the images of a group share theirs."""
    keys = [str(reference) if isinstance(reference, Path) else id(reference) for reference in references]
    unique = dict(zip(keys, references, strict=True))
    rows = {key: row for row, key in enumerate(unique)}
    return features([read(reference) for reference in unique.values()])[[rows[key] for key in keys]]
