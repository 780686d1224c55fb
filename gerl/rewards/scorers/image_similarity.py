"""Likeness of the drawn image to a reference image, for editing and for drawing a given subject.

Source: the CLIP-I metric of "DreamBooth" (arXiv 2208.12242), section 4.2.
"""

from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageOps

from gerl.errors import DataError
from gerl.rewards.scorers.base import Metadata
from gerl.rewards.scorers.clip_tower import ClipScorer


@dataclass(frozen=True, kw_only=True)
class ImageSimilarity(ClipScorer):
    """Cosine of the CLIP features of image and reference, in [-1, 1], 1 for the reference itself.

    The reference is the row's `metadata_key`: a path, absolute or from the current directory, or a PIL image.
    """

    metadata_key: str = "image"

    def __call__(self, images: list[Image.Image], prompts: list[str], metadata: list[Metadata]) -> list[float]:
        references = [self.reference(prompt, row) for prompt, row in zip(prompts, metadata, strict=True)]
        # The images of a group have one reference: it is read and encoded once.
        keys = [str(reference) if isinstance(reference, Path) else id(reference) for reference in references]
        unique = dict(zip(keys, references, strict=True))
        pictures = [_read(reference) for reference in unique.values()]
        rows = {key: row for row, key in enumerate(unique)}
        wanted = self.tower.image_features(pictures, self.batch_size)[[rows[key] for key in keys]]
        return (self.tower.image_features(images, self.batch_size) * wanted).sum(-1).tolist()

    def check_prompt(self, prompt: str, metadata: Metadata) -> None:
        self.reference(prompt, metadata)

    def reference(self, prompt: str, metadata: Metadata) -> Path | Image.Image:
        """The file or the image to be like; raises `DataError` if there is none."""
        given = metadata.get(self.metadata_key)
        if isinstance(given, Image.Image):
            return given
        if not isinstance(given, str | Path) or not str(given):
            raise DataError(
                f"{prompt!r} has no reference for the image_similarity scorer, which should be the path of an image "
                f"in the row's {self.metadata_key!r}, got {given!r}: add it, or name the column with metadata_key"
            )
        file = Path(given).expanduser()
        if not file.is_file():
            raise DataError(
                f"{prompt!r} has the reference {str(given)!r}, but there is no file {file.absolute()}: correct the path"
            )
        return file


def _read(reference: Path | Image.Image) -> Image.Image:
    if isinstance(reference, Image.Image):
        return reference
    with Image.open(reference) as image:
        upright: Image.Image = ImageOps.exif_transpose(image)  # as pipelines read it
        return upright.convert("RGB")
