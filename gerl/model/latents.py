"""The clean latents of image files, encoded by the pipeline's VAE once and kept."""

from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from diffusers import DiffusionPipeline
from PIL import Image

from gerl.config import ModelConfig
from gerl.engine.latents import Inverse, record_decoding
from gerl.engine.tape import batch_size
from gerl.errors import ModelError
from gerl.model.hub import fetch
from gerl.model.paths import resolve
from gerl.model.prompts import PromptCache, identity
from gerl.utils.condition_images import read_picture
from gerl.utils.seeding import derive_seed

PROBED = 64  # pixels per side of the image that shows the scale of the latents


class ImageLatents:
    """Image files as the VAE encodes them, in memory and on disk, and their clean latents."""

    def __init__(self, gb: float, folder: Path | None = None) -> None:
        """`gb`: memory that it may take; `folder`: where it is kept as files as well."""
        self.kept = PromptCache(gb, folder)
        self.inverses: dict[str, Inverse] = {}  # by the arguments that decide the shape of latents
        self.sizes: dict[str, tuple[int, int]] = {}  # height and width in pixels, by the same

    def read(
        self, pipe: DiffusionPipeline, call: Mapping[str, object], paths: Sequence[str]
    ) -> tuple[torch.Tensor, np.ndarray]:
        """The clean latents `[B, ...]` fp32 of the files, and their images `[B, H, W, 3]` uint8 as they are encoded.

        `call`: the arguments of the pipeline for a single sample, which decide the size. The shorter side of an image
        is brought to that size, and the middle of the longer one cut out.

        Raises:
            ModelError: the pipeline's way from its latents to its VAE is not known, or the VAE overflows.
            DataError: a file cannot be read.
        """
        # what decides the shape of latents: all arguments but the prompt, of images their sizes
        others = {name: getattr(value, "size", value) for name, value in sorted(call.items()) if "prompt" not in name}
        shape = f"{batch_size(call)} {others}"
        if shape not in self.inverses:
            inverse = Inverse(pipe, record_decoding(pipe, call))
            self.sizes[shape], self.inverses[shape] = _size(pipe, call, inverse), inverse
        inverse, (height, width) = self.inverses[shape], self.sizes[shape]
        images = [fitted(read_picture(path), height, width) for path in paths]
        found = [
            inverse.of(self._encoded(pipe, path, image, len(inverse.shape)))
            for path, image in zip(paths, images, strict=True)
        ]
        return torch.cat(found), np.stack(images)

    def _encoded(self, pipe: DiffusionPipeline, path: str, image: np.ndarray, dimensions: int) -> torch.Tensor:
        """z of an image: a sample of its VAE posterior, the same each time."""
        digest = sha256(image.tobytes()).hexdigest()
        key = f"image {digest} {image.shape}"
        z = self.kept.find(key)
        if z is None:
            generator = torch.Generator().manual_seed(derive_seed("encoded image", digest))
            z = encoded(pipe, image, dimensions, generator).float().cpu()
            if not bool(torch.isfinite(z).all()):
                raise ModelError(
                    f"the VAE of {type(pipe).__name__} overflows on {path}: use model.dtype=bfloat16 or float32"
                )
            self.kept.keep(key, z)
        assert isinstance(z, torch.Tensor)
        return z.to(pipe._execution_device)


def latents_folder(cache: Path, model: ModelConfig, dtype: torch.dtype) -> Path:
    """The folder inside `cache` for the outputs of the VAE of `model` in `dtype`."""
    given = resolve(model.path)
    folder = Path(given if Path(given).is_dir() else fetch(given))
    parts = [path.name for path in folder.iterdir() if path.name.startswith("vae")]
    return cache.expanduser() / "images" / identity(folder, sorted(parts), dtype)


def fitted(image: Image.Image, height: int, width: int) -> np.ndarray:
    """The middle of an image that has this shape, as `[height, width, 3]` uint8."""
    scale = max(height / image.height, width / image.width)
    size = max(width, round(image.width * scale)), max(height, round(image.height * scale))
    resized = image if image.size == size else image.resize(size, Image.Resampling.BICUBIC)
    left, top = (size[0] - width) // 2, (size[1] - height) // 2
    return np.asarray(resized.crop((left, top, left + width, top + height)))


@torch.no_grad()
def encoded(pipe: DiffusionPipeline, image: np.ndarray, dimensions: int, generator: torch.Generator) -> torch.Tensor:
    """An image `[H, W, 3]` uint8 encoded by the VAE of `pipe`, as the pipeline hands it to its decoder.

    `dimensions`: 5 where the VAE is one of videos.
    """
    vae = pipe.vae
    encoder = getattr(vae, "encoder", None)
    dtype = next((p.dtype for p in encoder.parameters()), vae.dtype) if encoder is not None else vae.dtype
    pixels = torch.from_numpy(image.copy()).to(pipe._execution_device).permute(2, 0, 1)[None]
    x = (pixels.float() / 127.5 - 1).to(dtype)
    output = vae.encode(x[:, :, None] if dimensions == 5 else x)
    if hasattr(output, "latent_dist"):
        sample: torch.Tensor = output.latent_dist.sample(generator)
        return sample
    latents: torch.Tensor = output.latents if hasattr(output, "latents") else output.latent
    return latents


def _size(pipe: DiffusionPipeline, call: Mapping[str, object], inverse: Inverse) -> tuple[int, int]:
    """Height and width of the images of a call, in pixels."""
    given = call.get("height"), call.get("width")
    if isinstance(given[0], int) and isinstance(given[1], int):
        return given[0], given[1]
    grey = np.full((PROBED, PROBED, 3), 128, np.uint8)
    z = encoded(pipe, grey, len(inverse.shape), torch.Generator().manual_seed(0))
    height, width = (PROBED // z.shape[d] * inverse.shape[d] for d in (-2, -1))
    return height, width
